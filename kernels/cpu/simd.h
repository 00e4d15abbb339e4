/* Sixteen float lanes on any ISA: one zmm, two ymm, or four 16-byte vectors. Ops that need no more are written once. */
#ifndef KV_SIMD_H
#define KV_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define KV_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#define KV_DOT_BF16 1 /* vdpbf16ps */
#else
#define KV_DOT_BF16 0
#endif

#if defined(__AVX512F__)
#define KV_PARTS 1
#define KV_LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KV_PARTS 2
#define KV_LANES 8
#else
#define KV_PARTS 4
#define KV_LANES 4
#endif

typedef float kv_fpart __attribute__((vector_size(KV_LANES * 4)));
typedef int32_t kv_ipart __attribute__((vector_size(KV_LANES * 4)));
typedef float kv_fpart_u __attribute__((vector_size(KV_LANES * 4), aligned(4)));
typedef int32_t kv_ipart_u __attribute__((vector_size(KV_LANES * 4), aligned(4)));

typedef struct {
    kv_fpart p[KV_PARTS];
} kv_f16; /* 16 floats */
typedef struct {
    kv_ipart p[KV_PARTS];
} kv_i16; /* 16 int32 */

#define KV_EACH for (int part_ = 0; part_ < KV_PARTS; part_++)
#define P_ p[part_]

KV_INLINE float kv_bf16_float(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Round to nearest even; NaN stays NaN. */
KV_INLINE uint16_t kv_float_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

KV_INLINE float kv_half_float(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, magnitude = x & 0x7fff;
    uint32_t bits = magnitude >= 0x7c00 ? magnitude << 13 | 0x7f800000u : (magnitude << 13) + (112u << 23);
    float f;
    if (magnitude < 0x400) {
        f = (float)magnitude * 0x1p-24f;
        memcpy(&bits, &f, 4);
    }
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}

KV_INLINE kv_fpart kv_part(float x) { return x - (kv_fpart){0}; }
KV_INLINE kv_f16 kv_set(float x) {
    kv_f16 r;
    KV_EACH r.P_ = kv_part(x);
    return r;
}
KV_INLINE kv_f16 kv_load(const float *x) {
    kv_f16 r;
    KV_EACH r.P_ = *(const kv_fpart_u *)(x + part_ * KV_LANES);
    return r;
}
KV_INLINE void kv_store(float *x, kv_f16 a) { KV_EACH *(kv_fpart_u *)(x + part_ * KV_LANES) = a.P_; }
KV_INLINE kv_f16 kv_add(kv_f16 a, kv_f16 b) {
    KV_EACH a.P_ += b.P_;
    return a;
}
KV_INLINE kv_f16 kv_sub(kv_f16 a, kv_f16 b) {
    KV_EACH a.P_ -= b.P_;
    return a;
}
KV_INLINE kv_f16 kv_mul(kv_f16 a, kv_f16 b) {
    KV_EACH a.P_ *= b.P_;
    return a;
}
KV_INLINE kv_f16 kv_div(kv_f16 a, kv_f16 b) {
    KV_EACH a.P_ /= b.P_;
    return a;
}

/* a · b + c, with one rounding where the ISA has it. */
KV_INLINE kv_f16 kv_fma(kv_f16 a, kv_f16 b, kv_f16 c) {
#if KV_PARTS == 1
    c.p[0] = (kv_fpart)_mm512_fmadd_ps((__m512)a.p[0], (__m512)b.p[0], (__m512)c.p[0]);
#elif KV_PARTS == 2
    KV_EACH c.P_ = (kv_fpart)_mm256_fmadd_ps((__m256)a.P_, (__m256)b.P_, (__m256)c.P_);
#else
    KV_EACH c.P_ += a.P_ * b.P_;
#endif
    return c;
}

KV_INLINE kv_i16 kv_load_int(const void *x) {
    kv_i16 r;
    KV_EACH r.P_ = *(const kv_ipart_u *)((const char *)x + part_ * KV_LANES * 4);
    return r;
}
KV_INLINE kv_f16 kv_int_float(kv_i16 a) {
    kv_f16 r;
    KV_EACH r.P_ = __builtin_convertvector(a.P_, kv_fpart);
    return r;
}
KV_INLINE kv_f16 kv_int_bits(kv_i16 a) {
    kv_f16 r;
    KV_EACH r.P_ = (kv_fpart)a.P_;
    return r;
}

KV_INLINE kv_f16 kv_load_bf16(const uint16_t *x) {
#if KV_PARTS == 1
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    return (kv_f16){{(kv_fpart)_mm512_slli_epi32(wide, 16)}};
#elif KV_PARTS == 2
    kv_f16 r;
    KV_EACH {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(x + part_ * 8)));
        r.P_ = (kv_fpart)_mm256_slli_epi32(wide, 16);
    }
    return r;
#else
    float wide[16];
    for (int i = 0; i < 16; i++) wide[i] = kv_bf16_float(x[i]);
    return kv_load(wide);
#endif
}

KV_INLINE kv_f16 kv_load_half(const uint16_t *x) {
#if KV_PARTS == 1
    return (kv_f16){{(kv_fpart)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x))}};
#elif KV_PARTS == 2
    kv_f16 r;
    KV_EACH r.P_ = (kv_fpart)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + part_ * 8)));
    return r;
#else
    float wide[16];
    for (int i = 0; i < 16; i++) wide[i] = kv_half_float(x[i]);
    return kv_load(wide);
#endif
}

KV_INLINE void kv_store_bf16(uint16_t *x, kv_f16 a) {
#if KV_DOT_BF16
    _mm256_storeu_si256((__m256i *)x, (__m256i)_mm512_cvtneps_pbh((__m512)a.p[0]));
#else
    float wide[16];
    kv_store(wide, a);
    for (int i = 0; i < 16; i++) x[i] = kv_float_bf16(wide[i]);
#endif
}

/* The sum of the lanes, in one fixed order on every ISA. */
KV_INLINE float kv_reduce(kv_f16 a) {
    float x[16] __attribute__((aligned(64)));
    kv_store(x, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

/* e^x, about 1 ulp for |x| ≤ 87; beyond it saturates to e^±87. Cody-Waite reduction, degree-6 polynomial (Cephes). */
KV_INLINE kv_f16 kv_exp(kv_f16 x) {
    kv_f16 r;
    KV_EACH {
        kv_fpart v = x.P_;
        kv_ipart high = v > 87.0f, low = v < -87.0f; /* NaN is neither and passes */
        v = (kv_fpart)(((kv_ipart)v & ~high & ~low) | ((kv_ipart)kv_part(87.0f) & high) | ((kv_ipart)kv_part(-87.0f) & low));
        kv_fpart t = v * 1.44269504088896341f + 12582912.0f; /* 1.5 · 2^23: rounds to an integer */
        kv_ipart n = (kv_ipart)t - 0x4b400000;
        kv_fpart k = t - 12582912.0f;
        kv_fpart f = v - k * 0.693359375f;
        f = f + k * 2.12194440e-4f;
        kv_fpart y = f * 1.9875691500e-4f + 1.3981999507e-3f;
        y = y * f + 8.3334519073e-3f;
        y = y * f + 4.1665795894e-2f;
        y = y * f + 1.6666665459e-1f;
        y = y * f + 5.0000001201e-1f;
        y = y * f * f + f + 1.0f;
        r.P_ = y * (kv_fpart)((n + 127) << 23);
    }
    return r;
}

#endif
