/* Decode attention of the rows of one piece: query heads of every sequence that reads it, a tile at a time. */
#include <stdlib.h>

#include "attend_job.h"

#define STRIDE (KV_PART_WIDE + KV_MAX_TOKENS) /* of scores */
#define LINE_ALIGNED __attribute__((aligned(64))) /* a vector in two cache lines costs two loads */

static void load_row(int kind, const void *p, int64_t element, int dim, float scale, float *to) {
    for (int c = 0; c < dim; c += 16) v_store(to + c, v_mul(KV_LOAD16(kind, (const uint8_t *)p, element + c), v_set(scale)));
}

static void store_row(int kind, void *p, int64_t element, int dim, const float *from, float scale) {
    for (int c = 0; c < dim; c += 16) {
        v16 x = v_mul(v_load(from + c), v_set(scale));
        if (kind == KV_FP32) v_store((float *)p + element + c, x);
        else if (kind == KV_BF16) v_store_bf16((uint16_t *)p + element + c, x);
        else v_store_fp16((uint16_t *)p + element + c, x);
    }
}

/* Lines that are still to be prefetched: `count` segments from `at` bytes of the first on, `each` at a time. */
typedef struct {
    const kv_segment *segment;
    int64_t count, bytes, at, each;
} lines;

static inline void prefetch_some(lines *to) {
    for (int64_t i = 0; i < to->each && to->count; i++) {
        PREFETCH(to->segment->codes + to->at);
        if ((to->at += 64) < to->bytes) continue;
        to->at = 0;
        to->segment++;
        to->count--;
    }
}

/* Scores to probabilities relative to the part's top; returns the top, the sum in *total. count is a multiple of 16. Some
 * of `waiting` is prefetched with each vector. */
static float softmax(float *s, int64_t count, float *total, lines *waiting) {
    v16 top = v_set(-INFINITY), sum = v_set(0.0f);
    for (int64_t t = 0; t < count; t += 16) top = v_max(top, v_load(s + t));
    float peak = v_top(top);
    v16 base = v_set(peak == -INFINITY ? 0.0f : peak);
    for (int64_t t = 0; t < count; t += 16) {
        v16 p = v_exp(v_sub(v_load(s + t), base));
        sum = v_add(sum, p);
        v_store(s + t, p);
        prefetch_some(waiting);
    }
    *total = v_sum(sum);
    return peak;
}

static float page_log_sum_exp(const float *s, int tokens) {
    float held[KV_MAX_TOKENS], total;
    lines none = {0};
    memcpy(held, s, sizeof(float) * (size_t)tokens);
    float top = softmax(held, tokens, &total, &none);
    return top + logf(total);
}

void kv_merge_parts(const kv_job *j, int32_t b, int32_t head) {
    const kv_decode *call = j->call;
    const int dim = j->layer->head_dim;
    const int64_t row = call->q_heads * (int64_t)(dim + 2);
    const float *part = j->partial + j->part_start[b] * row + head * (int64_t)(dim + 2);
    const int32_t parts = part_count(j, b);
    float top = -INFINITY, total = 0.0f, sum[KV_MAX_DIM] = {0};
    for (int32_t i = 0; i < parts; i++) top = fmaxf(top, part[i * row + dim]);
    for (int32_t i = 0; i < parts; i++) {
        const float *x = part + i * row;
        if (x[dim + 1] == 0.0f) continue; /* a total that is not a number counts */
        float weight = expf(x[dim] - top);
        total += weight * x[dim + 1];
        for (int c = 0; c < dim; c += 16) v_store(sum + c, v_fma(v_load(x + c), v_set(weight), v_load(sum + c)));
    }
    int64_t to = (call->query_starts[b] * (int64_t)call->q_heads + head) * dim;
    store_row(call->q_kind, call->out, to, dim, sum, total == 0.0f ? 0.0f : 1.0f / total);
}

/* One row of a tile: a query head of a member. */
typedef struct {
    int32_t b, head, first, tail; /* sequence, query head, first page, tokens of the tail */
    float *partial;
} row;

static row row_of(const kv_job *j, const kv_pass *pass, int32_t kv_head, int index) {
    const kv_decode *call = j->call;
    const int group = call->q_heads / j->layer->kv_heads;
    row x = {.b = j->members[pass->first + index / group], .head = kv_head * group + index % group};
    x.first = first_page(j, x.b, pass->part);
    x.tail = pass->part + 1 == part_count(j, x.b) ? call->tail_lengths[x.b] : 0;
    int64_t at = (j->part_start[x.b] + pass->part) * (int64_t)call->q_heads + x.head;
    x.partial = j->partial + at * (j->layer->head_dim + 2);
    return x;
}

/* Rows from r on that share a tail. */
static int same_sequence(const row *x, int r, int rows) {
    int end = r + 1;
    while (end < rows && x[end].b == x[r].b) end++;
    return end - r;
}

/* Scores to probabilities: soft-cap, window, padding, softmax. Leaves top and total in the partial result. */
static void weigh(const kv_job *j, const row *x, int32_t pages, float *s, lines *waiting) {
    const kv_decode *call = j->call;
    const int tokens = j->layer->block_size, dim = j->layer->head_dim;
    const int64_t used = (int64_t)pages * tokens + x->tail, all = (used + 15) / 16 * 16;
    if (call->softcap > 0.0f)
        for (int64_t i = 0; i < used; i += 16) v_store(s + i, v_softcap(v_load(s + i), call->softcap));
    if (call->window) {
        int64_t length = (int64_t)call->page_counts[x->b] * tokens + call->tail_lengths[x->b];
        int64_t hidden = length - call->window - (int64_t)x->first * tokens;
        for (int64_t i = 0; i < least(hidden, used); i++) s[i] = -INFINITY;
    }
    for (int64_t i = used; i < all; i++) s[i] = -INFINITY;
    if (call->page_lse) {
        float *lse = call->page_lse + (x->b * (int64_t)call->q_heads + x->head) * call->max_pages + x->first;
        for (int32_t i = 0; i < pages; i++) lse[i] = page_log_sum_exp(s + i * tokens, tokens);
    }
    x->partial[dim] = softmax(s, all, x->partial + dim + 1, waiting);
}

static void attend_tile(const kv_job *j, const kv_piece *w, const row *x, int rows) {
    const kv_decode *call = j->call;
    const kv_layer *layer = j->layer;
    const int dim = layer->head_dim, tokens = layer->block_size;
    const int64_t sealed = (int64_t)w->count * tokens, tail_head = w->head * kv_width(layer->tail_kind, (int64_t)tokens * dim);
    const float k_scale = call->scales ? call->scales[0] : 1.0f, v_scale = call->scales ? call->scales[1] : 1.0f;
    const int rounded = call->q_kind == KV_BF16; /* activations carry eight significant bits */
    LINE_ALIGNED float q[KV_ROWS * KV_MAX_DIM], o[KV_ROWS * KV_MAX_DIM], s[KV_ROWS * STRIDE];
    uint16_t stored[KV_ROWS * KV_MAX_DIM]; /* q as it came, if it is bf16 */
    for (int r = 0; r < rows; r++) {
        int64_t at = call->query_starts[x[r].b] * call->q_stride + x[r].head * (int64_t)dim;
        load_row(call->q_kind, call->q, at, dim, call->scale, q + r * KV_MAX_DIM);
        if (rounded) memcpy(stored + r * KV_MAX_DIM, (const uint16_t *)call->q + at, sizeof *stored * (size_t)dim);
        memset(o + r * KV_MAX_DIM, 0, sizeof(float) * (size_t)dim);
    }
    if (!rounded || !(kv_scores_bf16(layer, rows, w->count, w->k, w->k_ahead, stored, call->scale, s, STRIDE) ||
                      kv_scores_bytes(layer, rows, w->count, w->k, w->k_ahead, q, k_scale, s, STRIDE)))
        kv_scores(layer, rows, w->count, w->k, w->k_ahead, q, k_scale, s, STRIDE);
    for (int r = 0, some; r < rows; r += some) {
        some = same_sequence(x, r, rows);
        if (!x[r].tail) continue;
        const uint8_t *tail = call->tails + call->tail_slots[x[r].b] * layer->tail_bytes + layer->tail_k + tail_head;
        kv_tail_scores(layer, some, x[r].tail, tail, q + r * KV_MAX_DIM, s + r * STRIDE + sealed, STRIDE);
    }
    const int64_t vectors = rows * (sealed / 16); /* and those of tails */
    lines waiting = {w->between, w->waiting, layer->v.head_codes, 0, 0};
    waiting.each = vectors ? (waiting.count * waiting.bytes / 64 + vectors - 1) / vectors : 0;
    for (int r = 0; r < rows; r++) weigh(j, x + r, w->count, s + r * STRIDE, &waiting);
    kv_values(layer, rows, w->count, w->v, w->v_ahead, s, STRIDE, v_scale, rounded, o);
    for (int r = 0, some; r < rows; r += some) {
        some = same_sequence(x, r, rows);
        if (!x[r].tail) continue;
        const uint8_t *tail = call->tails + call->tail_slots[x[r].b] * layer->tail_bytes + layer->tail_v + tail_head;
        kv_tail_values(layer, some, x[r].tail, tail, s + r * STRIDE + sealed, STRIDE, o + r * KV_MAX_DIM);
    }
    for (int r = 0; r < rows; r++) memcpy(x[r].partial, o + r * KV_MAX_DIM, sizeof(float) * (size_t)dim);
}

void kv_attend_piece(const kv_job *j, const kv_pass *pass, const kv_piece *piece) {
    const int total = pass->count * (j->call->q_heads / j->layer->kv_heads);
    const int tiles = (total + KV_ROWS - 1) / KV_ROWS;
    for (int t = 0, done = 0; t < tiles; t++) {
        row x[KV_ROWS];
        const int rows = (total - done) / (tiles - t);
        for (int r = 0; r < rows; r++) x[r] = row_of(j, pass, piece->head, done + r);
        attend_tile(j, piece, x, rows);
        done += rows;
    }
}
