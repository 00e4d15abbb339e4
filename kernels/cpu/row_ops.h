/* What a decoder does to one row between products; used by the whole step and by the single ops. Rows are multiples of 16
 * values; `is_bf16` says how values outside float rows are stored. */
#ifndef KV_ROW_OPS_H
#define KV_ROW_OPS_H

#include "simd.h"

KV_INLINE kv_f16 kv_take(int32_t is_bf16, const void *x, int64_t at) {
    return is_bf16 ? kv_load_bf16((const uint16_t *)x + at) : kv_load((const float *)x + at);
}
KV_INLINE void kv_put(int32_t is_bf16, void *x, int64_t at, kv_f16 value) {
    if (is_bf16) kv_store_bf16((uint16_t *)x + at, value);
    else kv_store((float *)x + at, value);
}

KV_INLINE float kv_inverse_rms(const float *x, int64_t n, float eps) {
    kv_f16 squares = kv_set(0);
    for (int64_t i = 0; i < n; i += 16) squares = kv_fma(kv_load(x + i), kv_load(x + i), squares);
    return 1.0f / __builtin_sqrtf(kv_reduce(squares) / (float)n + eps);
}

KV_INLINE void kv_normalise(const float *x, int64_t n, float scale, const float *weight, float *to) {
    for (int64_t i = 0; i < n; i += 16)
        kv_store(to + i, kv_mul(kv_mul(kv_load(x + i), kv_set(scale)), kv_load(weight + i)));
}

/* Rotates channel i with channel i + n/2, in place; cos, sin [n/2]. */
KV_INLINE void kv_turn(float *x, int64_t n, const float *cos, const float *sin) {
    int64_t half = n / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

/* silu(gate) * up */
KV_INLINE kv_f16 kv_silu_mul(kv_f16 gate, kv_f16 up) {
    return kv_mul(kv_div(gate, kv_add(kv_exp(kv_sub(kv_set(0), gate)), kv_set(1))), up);
}

#endif
