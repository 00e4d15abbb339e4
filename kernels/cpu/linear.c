/* y = x · Wᵀ with W packed for vectors of 16 outputs.
 *
 * A panel holds 32 rows of W as two blocks of 16 (a gated weight: 16 gates and their 16 ups), group by group of 32
 * inputs: panel = [group][block][group bytes]. Rows and columns beyond the weight are zero. Bytes of one group:
 *
 *   f32   float [32 k][16 rows]
 *   bf16  [16 pairs][16 rows][2 k]
 *   q8    float scale [16], int8 [16 pairs][16 rows][2 k]
 *   q4    half scale [16], half minimum [16], then 4 × 64 bytes, each 8 k: uint16 [16 rows][2], whose nibble p in word h
 *         is k = 2p + h.                                                              weight = scale · code + minimum
 *
 * Order of operations of one element, on every path: within a group a chain over k in order (scaled formats: from zero);
 * for scaled formats then acc = scale · group + acc and acc = minimum · Σx + acc. So no result depends on other rows.
 */
#include "linear.h"

#include "linear_panel.h"
#include "row_ops.h"
#include "threads.h"

#define ROW_CHUNK 192 /* rows of one task: decoding a panel is paid once for them */

typedef struct {
    const kv_linear *w;
    const kv_rows *x;
    int32_t result;
    float *y;
    int64_t ld;
    kv_rows *gated_out;
    int64_t panels, panels_per_task, row_chunk, tasks;
    int32_t threads;
} job;

static void finish(const job *j, int64_t panel, int64_t first, int64_t rows, const float *tile) {
    const kv_linear *w = j->w;
    if (w->gated) {
        for (int64_t r = 0; r < rows; r++) {
            kv_f16 value = kv_silu_mul(kv_load(tile + r * 32), kv_load(tile + r * 32 + 16));
            kv_rows_put(j->gated_out, first + r, panel * 16, value);
        }
        return;
    }
    int64_t column = panel * 32, columns = w->out - column < 32 ? w->out - column : 32;
    for (int64_t r = 0; r < rows; r++) {
        float *y = j->y + (first + r) * j->ld + column;
        const float *t = tile + r * 32;
        int64_t c = 0;
        for (; c + 16 <= columns; c += 16) {
            kv_f16 value = kv_load(t + c);
            if (w->bias) value = kv_add(value, kv_load(w->bias + column + c));
            kv_store(y + c, j->result == KV_ADD ? kv_add(kv_load(y + c), value) : value);
        }
        for (; c < columns; c++) {
            float value = w->bias ? t[c] + w->bias[column + c] : t[c];
            y[c] = j->result == KV_ADD ? y[c] + value : value;
        }
    }
}

/* The task that is handed out as the index-th. Threads take turns, by and large, and each gets a stretch of neighbours:
 * what one task prefetches beyond its end is what the same thread wants next. */
static int64_t stretched(const job *j, int64_t index) {
    int64_t length = j->tasks / j->threads, longer = j->tasks % j->threads, turn = index % j->threads;
    return turn * length + (turn < longer ? turn : longer) + index / j->threads;
}

static void task(void *ctx, int64_t index, int32_t thread) {
    (void)thread;
    const job *j = ctx;
    index = stretched(j, index);
    int64_t per_chunk = (j->panels + j->panels_per_task - 1) / j->panels_per_task;
    int64_t first = index / per_chunk * j->row_chunk, panel = index % per_chunk * j->panels_per_task;
    int64_t end = panel + j->panels_per_task < j->panels ? panel + j->panels_per_task : j->panels;
    int64_t rows = j->x->rows - first < j->row_chunk ? j->x->rows - first : j->row_chunk;
    float tile[ROW_CHUNK * 32] __attribute__((aligned(64)));
    for (; panel < end; panel++) {
#if KV_DOT_BF16
        if (j->x->is_bf16) kv_panel_bf16(j->w, j->x, panel, first, rows, tile);
        else
#endif
            kv_panel_float(j->w, j->x, panel, first, rows, tile);
        finish(j, panel, first, rows, tile);
    }
}

void kv_linear_run(const kv_linear *w, const kv_rows *x, int32_t result, float *y, int64_t ld, kv_rows *gated_out) {
    int64_t columns = w->gated ? w->out / 2 : w->out, width = w->gated ? 16 : 32;
    int64_t panels = (columns + width - 1) / width;
    job j = {w, x, result, y, ld, gated_out, panels, 1, ROW_CHUNK, 0, kv_threads()};
    int64_t wanted = j.threads * 16;
    if (x->rows <= KV_SMALL_ROWS && panels > wanted) j.panels_per_task = panels / wanted;
    int64_t chunks = (x->rows + ROW_CHUNK - 1) / ROW_CHUNK;
    if (chunks) j.row_chunk = (x->rows + chunks - 1) / chunks;
    int64_t per_chunk = (panels + j.panels_per_task - 1) / j.panels_per_task;
    j.tasks = chunks * per_chunk;
    kv_parallel(j.tasks, task, &j);
}

void kv_rows_sum(const kv_rows *rows, int64_t row) {
    int64_t groups = rows->stride / KV_GROUP;
    float *sums = rows->sums + row * groups;
    for (int64_t g = 0; g < groups; g++) {
        int64_t at = row * rows->stride + g * KV_GROUP;
        kv_f16 a = rows->is_bf16 ? kv_load_bf16((uint16_t *)rows->x + at) : kv_load((float *)rows->x + at);
        kv_f16 b = rows->is_bf16 ? kv_load_bf16((uint16_t *)rows->x + at + 16) : kv_load((float *)rows->x + at + 16);
        sums[g] = kv_reduce(kv_add(a, b));
    }
}

int32_t kv_has_bf16_dot(void) { return KV_DOT_BF16; }
