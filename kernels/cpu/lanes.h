/* Sixteen fp32 lanes, the unit all attention kernels are written in, for three instruction sets.
 *
 * v16 is one AVX-512 register, two AVX2 registers or an array. v_* functions are element-wise unless said otherwise;
 * v_fma(a, b, c) = a * b + c (fused where the ISA fuses). The loaders widen sixteen stored elements to fp32 exactly.
 */
#ifndef KV_LANES_H
#define KV_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline, unused))
#define PREFETCH(p) __builtin_prefetch((p), 0, 3)

/* Value of an int4 scale byte: five exponent bits, three mantissa bits (formats/int4.py). */
INLINE float f_e5m3(uint8_t byte) {
    uint32_t bits = ((uint32_t)byte << 20) + (103u << 23);
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE float f_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Round to nearest even; NaN stays NaN. */
INLINE uint16_t bf16_of(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "lanes_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "lanes_avx2.h"
#else
#include "lanes_portable.h"
#endif

/* e^x to 2 ulp. Below -87 the result is 0; above 88 it is clamped, so that no lane ever overflows. NaN stays NaN: v_min and
 * v_max return their second operand then. */
INLINE v16 v_exp(v16 x) {
    v16 held = v_min(v_set(88.0f), v_max(v_set(-87.0f), x));
    v16 n = v_round(v_mul(held, v_set(1.44269504088896341f)));
    v16 r = v_fma(n, v_set(-0.693359375f), held);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    v16 p = v_set(1.9875691500e-4f);
    p = v_fma(p, r, v_set(1.3981999507e-3f));
    p = v_fma(p, r, v_set(8.3334519073e-3f));
    p = v_fma(p, r, v_set(4.1665795894e-2f));
    p = v_fma(p, r, v_set(1.6666665459e-1f));
    p = v_fma(p, r, v_set(5.0000001201e-1f));
    p = v_fma(p, v_mul(r, r), v_add(r, v_set(1.0f)));
    return v_zero_below(v_scale2(p, n), x, -87.0f);
}

/* cap * tanh(x / cap), absolute error 1e-7 * cap. */
INLINE v16 v_softcap(v16 x, float cap) {
    v16 e = v_exp(v_mul(x, v_set(2.0f / cap)));
    v16 t = v_sub(v_set(1.0f), v_div(v_set(2.0f), v_add(e, v_set(1.0f))));
    return v_mul(t, v_set(cap));
}

#endif
