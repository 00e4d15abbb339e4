/* Root-mean-square normalisation of rows; contract in kernels/reference/rms_norm.py. */
#include <stddef.h>

#include "row_ops.h"
#include "threads.h"

typedef struct {
    const void *x;
    const float *weight;
    void *residual, *out;
    float *wide; /* [rows, n] */
    int64_t n;
    float eps;
    int32_t x_bf16, residual_bf16, out_bf16;
} job;

static void row_task(void *ctx, int64_t row, int32_t thread) {
    (void)thread;
    const job *j = ctx;
    int64_t n = j->n, at = row * n;
    float *wide = j->wide + at;
    for (int64_t i = 0; i < n; i += 16) {
        kv_f16 value = kv_take(j->x_bf16, j->x, at + i);
        if (j->residual) {
            kv_put(j->residual_bf16, j->residual, at + i, kv_add(value, kv_take(j->residual_bf16, j->residual, at + i)));
            value = kv_take(j->residual_bf16, j->residual, at + i);
        }
        kv_store(wide + i, value);
    }
    kv_normalise(wide, n, kv_inverse_rms(wide, n, j->eps), j->weight, wide);
    for (int64_t i = 0; i < n; i += 16) kv_put(j->out_bf16, j->out, at + i, kv_load(wide + i));
}

void kv_rms_norm(const void *x, const float *weight, void *residual, void *out, float *wide, int64_t rows, int64_t n,
                 float eps, int32_t x_bf16, int32_t residual_bf16, int32_t out_bf16) {
    job j = {x, weight, residual, out, wide, n, eps, x_bf16, residual_bf16, out_bf16};
    kv_parallel(rows, row_task, &j);
}
