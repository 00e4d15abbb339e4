/* Rotary positions; contract in kernels/reference/rope.py. */
#include "row_ops.h"
#include "threads.h"

#define MAX_DIM 512

typedef struct {
    void *x;
    const float *cos, *sin;
    int64_t stride, heads, dim;
    int32_t is_bf16;
} job;

static void token_task(void *ctx, int64_t token, int32_t thread) {
    (void)thread;
    const job *j = ctx;
    float wide[MAX_DIM];
    for (int64_t h = 0; h < j->heads; h++) {
        int64_t at = token * j->stride + h * j->dim;
        for (int64_t i = 0; i < j->dim; i += 16) kv_store(wide + i, kv_take(j->is_bf16, j->x, at + i));
        kv_turn(wide, j->dim, j->cos + token * j->dim / 2, j->sin + token * j->dim / 2);
        for (int64_t i = 0; i < j->dim; i += 16) kv_put(j->is_bf16, j->x, at + i, kv_load(wide + i));
    }
}

/* x: `tokens` rows of `heads` contiguous heads of dim <= MAX_DIM, `stride` elements apart; cos, sin [tokens, dim/2]. */
void kv_rope(void *x, const float *cos, const float *sin, int64_t tokens, int64_t stride, int64_t heads, int64_t dim,
             int32_t is_bf16) {
    job j = {x, cos, sin, stride, heads, dim, is_bf16};
    kv_parallel(tokens, token_task, &j);
}
