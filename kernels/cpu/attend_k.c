/* The K side: scores of whole pages (K channel-major) and of tails (K token-major). */
#include "attend.h"
#include "lanes.h"

/* Independent sums per row hide the latency of the multiply-add; AVX2 has registers for one only. */
#ifdef __AVX512F__
#define UNROLL 4
#else
#define UNROLL 1
#endif

/* Per-channel formats: q times the channel's scale into `folded`, q . centre into bias; k = centre + scale * code. */
INLINE void fold_fp16(int rows, int dim, const uint8_t *scales, const float *q, float *folded, float *bias) {
    const uint16_t *scale = (const uint16_t *)scales, *centre = scale + dim;
    v16 sum[KV_ROWS];
    for (int r = 0; r < rows; r++) sum[r] = v_set(0.0f);
    for (int c = 0; c < dim; c += 16) {
        v16 s = v_load_fp16(scale + c), m = v_load_fp16(centre + c);
        for (int r = 0; r < rows; r++) {
            v16 x = v_load(q + r * KV_MAX_DIM + c);
            v_store(folded + r * KV_MAX_DIM + c, v_mul(x, s));
            sum[r] = v_fma(x, m, sum[r]);
        }
    }
    for (int r = 0; r < rows; r++) bias[r] = v_sum(sum[r]);
}

/* int4: k = scale * (code - zero), so the bias is -(q * scale) . zero. */
INLINE void fold_e5m3(int rows, int dim, const uint8_t *scales, const float *q, float *folded, float *bias) {
    v16 sum[KV_ROWS];
    for (int r = 0; r < rows; r++) sum[r] = v_set(0.0f);
    for (int c = 0; c < dim; c += 16) {
        v16 s = v_load_e5m3(scales + c), z = v_load_i8(scales + dim + c);
        for (int r = 0; r < rows; r++) {
            v16 x = v_mul(v_load(q + r * KV_MAX_DIM + c), s);
            v_store(folded + r * KV_MAX_DIM + c, x);
            sum[r] = v_fma(x, z, sum[r]);
        }
    }
    for (int r = 0; r < rows; r++) bias[r] = -v_sum(sum[r]);
}

/* q . codes for sixteen tokens. `from` is the first token's element in a channel row, `next` is prefetched as we go. */
INLINE void dot16(const int kind, const int rows, int dim, int tokens, const uint8_t *codes, int from,
                  const uint8_t *next, const float *q, v16 *result) {
    v16 sum[KV_ROWS][UNROLL];
    for (int r = 0; r < rows; r++)
        for (int u = 0; u < UNROLL; u++) sum[r][u] = v_set(0.0f);
    if (kind == KV_I4) {
        int half = dim / 2;
        for (int c = 0; c < half; c += UNROLL) {
            for (int u = 0; u < UNROLL; u++) {
                int row = (c + u) * tokens;
                v16 low, high;
                v_load_nibbles(codes + row + from, &low, &high);
                for (int r = 0; r < rows; r++) {
                    sum[r][u] = v_fma(v_set(q[r * KV_MAX_DIM + c + u]), low, sum[r][u]);
                    sum[r][u] = v_fma(v_set(q[r * KV_MAX_DIM + half + c + u]), high, sum[r][u]);
                }
            }
            if (UNROLL == 4 || c % 4 == 0) PREFETCH(next + c * tokens);
        }
    } else {
        const int width = kind == KV_FP32 ? 4 : kind <= KV_FP16 ? 2 : 1;
        for (int c = 0; c < dim; c += UNROLL) {
            for (int u = 0; u < UNROLL; u++) {
                v16 k = KV_LOAD16(kind, codes, (c + u) * tokens + from);
                for (int r = 0; r < rows; r++) sum[r][u] = v_fma(v_set(q[r * KV_MAX_DIM + c + u]), k, sum[r][u]);
            }
            if (UNROLL == 4 || c % 4 == 0)
                for (int line = 0; line < width; line++) PREFETCH(next + c * tokens * width + line * 64);
        }
    }
    for (int r = 0; r < rows; r++) {
        for (int step = UNROLL / 2; step; step /= 2)
            for (int u = 0; u < step; u++) sum[r][u] = v_add(sum[r][u], sum[r][u + step]);
        result[r] = sum[r][0];
    }
}

INLINE void scores(const int kind, const int rows, const kv_layer *layer, int64_t pages, const kv_segment *page,
                   const kv_segment *ahead, const float *q, float tensor_scale, float *out, int64_t stride) {
    const int dim = layer->head_dim, tokens = layer->block_size, scaling = layer->k.scaling;
    const int64_t scale_bytes = layer->k.head_scales;
    float folded[KV_ROWS * KV_MAX_DIM], bias[KV_ROWS] = {0};
    for (int64_t i = 0; i < pages; i++) {
        const float *x = q;
        for (int64_t at = 0; at < scale_bytes; at += 64) PREFETCH(ahead[i].scales + at);
        if (scaling == KV_PER_CHANNEL) {
            if (kind == KV_I4) fold_e5m3(rows, dim, page[i].scales, q, folded, bias);
            else fold_fp16(rows, dim, page[i].scales, q, folded, bias);
            x = folded;
        }
        for (int from = 0; from < tokens; from += 16) {
            v16 dot[KV_ROWS];
            dot16(kind, rows, dim, tokens, page[i].codes, from, ahead[i].codes + from * 4, x, dot);
            v16 unit = v_set(kv_unit(kind));
            if (scaling == KV_PER_TOKEN) unit = v_mul(unit, v_load_fp16((const uint16_t *)page[i].scales + from));
            else if (scaling == KV_PER_TENSOR) unit = v_mul(unit, v_set(tensor_scale));
            for (int r = 0; r < rows; r++)
                v_store(out + r * stride + i * tokens + from, v_fma(dot[r], unit, v_set(bias[r])));
        }
    }
}

typedef void (*scores_fn)(const kv_layer *, int64_t, const kv_segment *, const kv_segment *, const float *, float, float *,
                          int64_t);

#define SCORES(kind, rows)                                                                                          \
    static void scores_##kind##_##rows(const kv_layer *l, int64_t n, const kv_segment *p, const kv_segment *a,      \
                                       const float *q, float t, float *o, int64_t s) {                              \
        scores(kind, rows, l, n, p, a, q, t, o, s);                                                                 \
    }
#define KIND(kind) SCORES(kind, 1) SCORES(kind, 2) SCORES(kind, 3) SCORES(kind, 4)
KIND(KV_FP32) KIND(KV_BF16) KIND(KV_FP16) KIND(KV_E4M3) KIND(KV_E5M2) KIND(KV_I8) KIND(KV_I4)
#define ENTRY(kind) [kind] = {scores_##kind##_1, scores_##kind##_2, scores_##kind##_3, scores_##kind##_4}

void kv_scores(const kv_layer *layer, int rows, int64_t pages, const kv_segment *page, const kv_segment *ahead,
               const float *q, float tensor_scale, float *out, int64_t stride) {
    static const scores_fn table[KV_KINDS][KV_ROWS] = {ENTRY(KV_FP32), ENTRY(KV_BF16), ENTRY(KV_FP16), ENTRY(KV_E4M3),
                                                       ENTRY(KV_E5M2), ENTRY(KV_I8),   ENTRY(KV_I4)};
    table[layer->k.kind][rows - 1](layer, pages, page, ahead, q, tensor_scale, out, stride);
}

void kv_tail_scores(const kv_layer *layer, int rows, int64_t tokens, const uint8_t *k, const float *q, float *out,
                    int64_t stride) {
    const int dim = layer->head_dim, kind = layer->tail_kind;
    for (int64_t t = 0; t < tokens; t++) {
        v16 sum[KV_ROWS];
        for (int r = 0; r < rows; r++) sum[r] = v_set(0.0f);
        for (int c = 0; c < dim; c += 16) {
            v16 x = kind == KV_FP32   ? v_load((const float *)k + t * dim + c)
                    : kind == KV_BF16 ? v_load_bf16((const uint16_t *)k + t * dim + c)
                                      : v_load_fp16((const uint16_t *)k + t * dim + c);
            for (int r = 0; r < rows; r++) sum[r] = v_fma(v_load(q + r * KV_MAX_DIM + c), x, sum[r]);
        }
        for (int r = 0; r < rows; r++) out[r * stride + t] = v_sum(sum[r]);
    }
}
