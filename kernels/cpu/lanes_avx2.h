/* AVX2 with FMA and F16C: two registers. Included by lanes.h only. */
#include <immintrin.h>

typedef struct {
    __m256 a, b;
} v16;

#define V8(name, expression) \
    INLINE v16 name(v16 x, v16 y) { return (v16){expression(x.a, y.a), expression(x.b, y.b)}; }

INLINE v16 v_set(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE v16 v_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void v_store(float *p, v16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
V8(v_add, _mm256_add_ps)
V8(v_sub, _mm256_sub_ps)
V8(v_mul, _mm256_mul_ps)
V8(v_div, _mm256_div_ps)
V8(v_max, _mm256_max_ps)
V8(v_min, _mm256_min_ps)
#undef V8
INLINE v16 v_fma(v16 x, v16 y, v16 z) {
    return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE v16 v_round(v16 x) {
    return (v16){_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                 _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
INLINE __m256 two_to(__m256 n) {
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
INLINE v16 v_scale2(v16 x, v16 n) {
    return (v16){_mm256_mul_ps(x.a, two_to(n.a)), _mm256_mul_ps(x.b, two_to(n.b))};
}
INLINE float sum8(__m256 x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE float v_sum(v16 x) { return sum8(_mm256_add_ps(x.a, x.b)); }
INLINE float v_top(v16 x) {
    __m256 m = _mm256_max_ps(x.a, x.b);
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
/* 0 where test < limit, else x. */
INLINE v16 v_zero_below(v16 x, v16 test, float limit) {
    __m256 l = _mm256_set1_ps(limit);
    return (v16){_mm256_and_ps(x.a, _mm256_cmp_ps(test.a, l, _CMP_NLT_UQ)),
                 _mm256_and_ps(x.b, _mm256_cmp_ps(test.b, l, _CMP_NLT_UQ))};
}

INLINE __m256 bf16x8(const void *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
INLINE v16 v_load_bf16(const void *p) { return (v16){bf16x8(p), bf16x8((const uint16_t *)p + 8)}; }
INLINE v16 v_load_fp16(const void *p) {
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128(p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const void *)((const uint16_t *)p + 8)))};
}
INLINE v16 halves(__m256i x) {
    return (v16){_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
INLINE v16 v_load_i8(const void *p) {
    __m128i x = _mm_loadu_si128(p);
    return (v16){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
                 _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
INLINE v16 v_load_e5m2(const void *p) {
    return halves(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(p)), 8));
}
/* The value divided by 256: an e4m3 pattern moved into fp16 fields, whose exponent bias is larger by 8. */
INLINE v16 v_load_e4m3_256th(const void *p) {
    __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), 7);
    return halves(_mm256_and_si256(x, _mm256_set1_epi16((short)0xbf80)));
}
INLINE __m256 e5m3x8(__m128i x) {
    __m256i y = _mm256_slli_epi32(_mm256_cvtepu8_epi32(x), 20);
    return _mm256_castsi256_ps(_mm256_add_epi32(y, _mm256_set1_epi32(103 << 23)));
}
INLINE v16 v_load_e5m3(const void *p) {
    __m128i x = _mm_loadu_si128(p);
    return (v16){e5m3x8(x), e5m3x8(_mm_srli_si128(x, 8))};
}
/* Low and high nibbles of sixteen bytes as fp32. */
INLINE void v_load_nibbles(const void *p, v16 *low, v16 *high) {
    __m128i x = _mm_loadu_si128(p);
    __m256i a = _mm256_cvtepu8_epi32(x), b = _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8));
    __m256i mask = _mm256_set1_epi32(15);
    *low = (v16){_mm256_cvtepi32_ps(_mm256_and_si256(a, mask)), _mm256_cvtepi32_ps(_mm256_and_si256(b, mask))};
    *high = (v16){_mm256_cvtepi32_ps(_mm256_srli_epi32(a, 4)), _mm256_cvtepi32_ps(_mm256_srli_epi32(b, 4))};
}

INLINE void v_store_bf16(void *p, v16 x) {
    float f[16];
    v_store(f, x);
    for (int i = 0; i < 16; i++) ((uint16_t *)p)[i] = bf16_of(f[i]);
}
INLINE void v_store_fp16(void *p, v16 x) {
    _mm_storeu_si128(p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((void *)((uint16_t *)p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
