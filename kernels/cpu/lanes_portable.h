/* Plain C arrays: any machine with a C compiler and IEEE floats. Included by lanes.h only. */

typedef struct {
    float f[16];
} v16;

#define EACH(expression) \
    v16 r;                                                \
    for (int i = 0; i < 16; i++) r.f[i] = (expression);   \
    return r

INLINE v16 v_set(float x) { EACH(x); }
INLINE v16 v_load(const float *p) { EACH(p[i]); }
INLINE void v_store(float *p, v16 x) { memcpy(p, x.f, sizeof x.f); }
INLINE v16 v_add(v16 a, v16 b) { EACH(a.f[i] + b.f[i]); }
INLINE v16 v_sub(v16 a, v16 b) { EACH(a.f[i] - b.f[i]); }
INLINE v16 v_mul(v16 a, v16 b) { EACH(a.f[i] * b.f[i]); }
INLINE v16 v_div(v16 a, v16 b) { EACH(a.f[i] / b.f[i]); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) { EACH(a.f[i] * b.f[i] + c.f[i]); }
INLINE v16 v_max(v16 a, v16 b) { EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
INLINE v16 v_min(v16 a, v16 b) { EACH(a.f[i] < b.f[i] ? a.f[i] : b.f[i]); }
/* To nearest even for |x| < 2^22. */
INLINE v16 v_round(v16 x) { EACH(rintf(x.f[i])); }
INLINE float two_to(float n) {
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
INLINE v16 v_scale2(v16 x, v16 n) { EACH(x.f[i] * two_to(n.f[i])); }
INLINE float v_sum(v16 x) {
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) x.f[i] += x.f[i + step];
    return x.f[0];
}
INLINE float v_top(v16 x) {
    float top = x.f[0];
    for (int i = 1; i < 16; i++) top = x.f[i] > top ? x.f[i] : top;
    return top;
}
/* 0 where test < limit, else x. */
INLINE v16 v_zero_below(v16 x, v16 test, float limit) { EACH(test.f[i] < limit ? 0.0f : x.f[i]); }

/* Exact fp16 to fp32 without hardware: rebias normal numbers, scale subnormal ones. */
INLINE float f_fp16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
    float f;
    if (rest < 0x0400) {
        f = (float)rest * 0x1p-24f;
        memcpy(&bits, &f, 4);
    } else {
        bits = rest >= 0x7c00 ? (rest << 13) + (224u << 23) : (rest << 13) + (112u << 23);
    }
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}
/* Round to nearest even; overflow becomes infinity. */
INLINE uint16_t fp16_of(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    float size = fabsf(f);
    if (size != size) return sign | 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | (uint16_t)(int32_t)rintf(size * 0x1p24f);
    memcpy(&bits, &size, 4);
    return sign | (uint16_t)((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
}

INLINE v16 v_load_bf16(const void *p) { EACH(f_bf16(((const uint16_t *)p)[i])); }
INLINE v16 v_load_fp16(const void *p) { EACH(f_fp16(((const uint16_t *)p)[i])); }
INLINE v16 v_load_i8(const void *p) { EACH((float)((const int8_t *)p)[i]); }
INLINE v16 v_load_e5m2(const void *p) { EACH(f_fp16((uint16_t)(((const uint8_t *)p)[i] << 8))); }
/* The value divided by 256: an e4m3 pattern moved into fp16 fields, whose exponent bias is larger by 8. */
INLINE v16 v_load_e4m3_256th(const void *p) {
    EACH(f_fp16((uint16_t)((((const uint8_t *)p)[i] & 0x80) << 8 | (((const uint8_t *)p)[i] & 0x7f) << 7)));
}
INLINE v16 v_load_e5m3(const void *p) { EACH(f_e5m3(((const uint8_t *)p)[i])); }
/* Low and high nibbles of sixteen bytes as fp32. */
INLINE void v_load_nibbles(const void *p, v16 *low, v16 *high) {
    for (int i = 0; i < 16; i++) {
        low->f[i] = (float)(((const uint8_t *)p)[i] & 15);
        high->f[i] = (float)(((const uint8_t *)p)[i] >> 4);
    }
}

INLINE void v_store_bf16(void *p, v16 x) {
    for (int i = 0; i < 16; i++) ((uint16_t *)p)[i] = bf16_of(x.f[i]);
}
INLINE void v_store_fp16(void *p, v16 x) {
    for (int i = 0; i < 16; i++) ((uint16_t *)p)[i] = fp16_of(x.f[i]);
}
#undef EACH
