/* Greedy choice over rows of float logits. */
#include "simd.h"
#include "threads.h"

typedef struct {
    const float *logits;
    int64_t columns;
    int32_t *best;
} job;

/* The lowest index of the largest value; -1 if one is NaN. */
static void argmax_task(void *ctx, int64_t row, int32_t thread) {
    (void)thread;
    const job *j = ctx;
    const float *x = j->logits + row * j->columns;
    float top[16];
    int32_t nan[16] = {0};
    int64_t n = j->columns, i = 0;
    for (int lane = 0; lane < 16; lane++) top[lane] = -__builtin_inff();
    for (; i + 16 <= n; i += 16)
        for (int lane = 0; lane < 16; lane++) {
            top[lane] = x[i + lane] > top[lane] ? x[i + lane] : top[lane];
            nan[lane] |= x[i + lane] != x[i + lane];
        }
    for (; i < n; i++) {
        top[0] = x[i] > top[0] ? x[i] : top[0];
        nan[0] |= x[i] != x[i];
    }
    for (int lane = 1; lane < 16; lane++) {
        top[0] = top[lane] > top[0] ? top[lane] : top[0];
        nan[0] |= nan[lane];
    }
    for (i = 0; i < n - 1 && x[i] != top[0]; i++) {}
    j->best[row] = nan[0] ? -1 : (int32_t)i;
}

/* best [rows] of logits [rows, columns], columns >= 1. */
void kv_argmax_rows(const float *logits, int64_t rows, int64_t columns, int32_t *best) {
    job j = {logits, columns, best};
    kv_parallel(rows, argmax_task, &j);
}
