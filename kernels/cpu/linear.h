/* Matrix products with packed weights; see linear.c for the byte layout. */
#ifndef KV_LINEAR_H
#define KV_LINEAR_H

#include <stdint.h>

#include "simd.h"

enum kv_format { KV_W_F32, KV_W_BF16, KV_W_Q8, KV_W_Q4 };
enum kv_result { KV_STORE, KV_ADD };

#define KV_GROUP 32 /* inputs that share a scale, and the unit to which rows of x are padded with zeros */

typedef struct {
    int32_t format; /* enum kv_format */
    int32_t out;    /* rows of the weight */
    int32_t in;     /* columns of the weight */
    int32_t gated;  /* the first half of the rows are gates of the second: y = silu(gate) · up, [rows, out/2] */
    const uint8_t *data;
    const float *bias; /* [out] or NULL */
} kv_linear;

/* Activations as the products read them: rows of `stride` elements (a multiple of KV_GROUP, zero-padded), and the sum
 * of each group of 32 of them. bf16 where the ISA multiplies bf16 and the model computes in it, else float. */
typedef struct {
    void *x;
    float *sums;
    int64_t rows, stride;
    int32_t is_bf16;
} kv_rows;

KV_INLINE int64_t kv_padded(int64_t in) { return (in + KV_GROUP - 1) / KV_GROUP * KV_GROUP; }

/* y [x.rows, out] float, leading dimension `ld`: stored or added to. A gated weight writes `gated_out` instead. Every
 * element is one chain of operations over `in` in order, the same for any number of rows and threads. */
void kv_linear_run(const kv_linear *w, const kv_rows *x, int32_t result, float *y, int64_t ld, kv_rows *gated_out);

/* Writes 16 values to row `row` of x at `column`. */
KV_INLINE void kv_rows_put(const kv_rows *rows, int64_t row, int64_t column, kv_f16 values) {
    if (rows->is_bf16) kv_store_bf16((uint16_t *)rows->x + row * rows->stride + column, values);
    else kv_store((float *)rows->x + row * rows->stride + column, values);
}

/* Whether this build multiplies bf16 activations. */
int32_t kv_has_bf16_dot(void);

/* Fills the group sums of row `row`; every product needs them. */
void kv_rows_sum(const kv_rows *rows, int64_t row);

#endif
