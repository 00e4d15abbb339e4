/* The gate of a feed-forward layer; contract in kernels/reference/silu_mul.py. */
#include "row_ops.h"
#include "threads.h"

typedef struct {
    const void *gate_up;
    void *out;
    int64_t n;
    int32_t is_bf16;
} job;

static void row_task(void *ctx, int64_t row, int32_t thread) {
    (void)thread;
    const job *j = ctx;
    for (int64_t i = 0; i < j->n; i += 16) {
        int64_t at = row * 2 * j->n + i;
        kv_f16 value = kv_silu_mul(kv_take(j->is_bf16, j->gate_up, at), kv_take(j->is_bf16, j->gate_up, at + j->n));
        kv_put(j->is_bf16, j->out, row * j->n + i, value);
    }
}

/* gate_up [rows, 2 n], out [rows, n]; n a multiple of 16. */
void kv_silu_mul_rows(const void *gate_up, void *out, int64_t rows, int64_t n, int32_t is_bf16) {
    job j = {gate_up, out, n, is_bf16};
    kv_parallel(rows, row_task, &j);
}
