/* Attention of one sequence's prompt chunk: K and V are decoded once into packed scratch, then tiles of query rows run over
 * blocks of keys with a running softmax.
 *
 * Blocks start at multiples of KEYS, and a row's sums never depend on the other rows of its tile, so a row's bits do not
 * depend on how the prompt was cut into chunks.
 */
#include <stdlib.h>

#include "decode.h"
#include "threads.h"
#include "tile.h"

#define KEYS 256 /* keys of a block */
#define ROWS 48  /* query rows of a task: (query, head of the group) pairs of one KV head */

typedef struct {
    const uint8_t *pages, *tail;
    const void *q;
    void *out;
    const int32_t *table;
    const float *scales; /* K and V scale of this layer, or NULL */
    uint8_t *scratch;    /* kv_prefill_scratch bytes, 64-byte aligned */
    int64_t q_stride, queries, page_count, tail_length;
    int32_t q_kind, q_heads, window;
    float scale, softcap;
} kv_prefill_call;

typedef struct {
    const kv_layer *layer;
    const kv_prefill_call *call;
    int64_t keys, blocks, k_block, v_row, tiles; /* bytes of a K block of sixteen and of a V word row */
    uint8_t *k, *v;
    int bf16;
} job;

static int64_t blocks_of(const kv_layer *l, int64_t pages, int64_t tail) { return (pages * l->block_size + tail + 15) / 16; }

static int use_bf16(const kv_layer *l, int32_t q_kind) { return HAVE_BF16 && q_kind == KV_BF16 && l->head_dim % 2 == 0; }

/* Bytes of scratch a chunk needs. */
int64_t kv_prefill_scratch(const kv_layer *l, int64_t pages, int64_t tail, int32_t q_kind) {
    int64_t word = use_bf16(l, q_kind) ? 2 : 4;
    return 2 * blocks_of(l, pages, tail) * 16 * l->head_dim * l->kv_heads * word;
}

/* Packs sixteen keys of one head; those from `valid` on are zero. */
static void pack(const job *j, int64_t block, int head, float grid[KV_MAX_DIM][16], float rows[16][KV_MAX_DIM]) {
    const int dim = j->layer->head_dim;
    uint8_t *k = j->k + (head * j->blocks + block) * j->k_block;
    uint8_t *v = j->v + (head * j->blocks + block) * 16 / (j->bf16 ? 2 : 1) * j->v_row;
    if (j->bf16) {
        for (int c = 0; c < dim; c += 2) store_pairs(k + c / 2 * 64, v_load(grid[c]), v_load(grid[c + 1]));
        for (int t = 0; t < 16; t += 2)
            for (int c = 0; c < dim; c += 16)
                store_pairs(v + t / 2 * j->v_row + c * 4, v_load(rows[t] + c), v_load(rows[t + 1] + c));
    } else {
        memcpy(k, grid, (size_t)dim * 64);
        for (int t = 0; t < 16; t++) memcpy(v + t * j->v_row, rows[t], (size_t)dim * 4);
    }
}

static void pack_task(void *context, int64_t task, int32_t thread) {
    (void)thread;
    const job *j = context;
    const kv_layer *l = j->layer;
    const kv_prefill_call *call = j->call;
    const int head = (int)(task % l->kv_heads), dim = l->head_dim;
    const int64_t block = task / l->kv_heads, first = block * 16, page_index = first / l->block_size;
    float grid[KV_MAX_DIM][16], rows[16][KV_MAX_DIM];
    if (page_index < call->page_count) {
        const uint8_t *page = call->pages + call->table[page_index] * l->page_bytes;
        const int from = (int)(first % l->block_size);
        decode_k(l, page + l->k.codes + head * l->k.head_codes, page + l->k.scales + head * l->k.head_scales, from,
                 call->scales ? call->scales[0] : 1.0f, grid);
        for (int t = 0; t < 16; t++)
            decode_v(l, page + l->v.codes + head * l->v.head_codes, page + l->v.scales + head * l->v.head_scales, from + t,
                     call->scales ? call->scales[1] : 1.0f, rows[t]);
    } else {
        const int64_t tail_first = first - call->page_count * l->block_size;
        memset(grid, 0, sizeof grid);
        memset(rows, 0, sizeof rows);
        for (int t = 0; t < 16 && tail_first + t < call->tail_length; t++) {
            int64_t index = head * (int64_t)l->block_size + tail_first + t;
            decode_tail(l, call->tail + l->tail_k, index, rows[t]);
            for (int c = 0; c < dim; c++) grid[c][t] = rows[t][c];
            decode_tail(l, call->tail + l->tail_v, index, rows[t]);
        }
    }
    pack(j, block, head, grid, rows);
}

#define ROW_CASES(call_with)                 \
    switch (rows) {                          \
        case 1: call_with(1); break;         \
        case 2: call_with(2); break;         \
        case 3: call_with(3); break;         \
        case 4: call_with(4); break;         \
        ROW_CASES_MORE(call_with)            \
    }
#if TILE_ROWS == 6
#define ROW_CASES_MORE(call_with) case 5: call_with(5); break; case 6: call_with(6); break;
#else
#define ROW_CASES_MORE(call_with)
#endif

INLINE void score_rows(const int bf16, const job *j, int rows, const uint8_t *x, int64_t x_stride, const uint8_t *k,
                       int64_t blocks, float *s) {
    const int depth = j->layer->head_dim / (bf16 ? 2 : 1);
    int64_t b = 0;
    for (; b + TILE_WIDE <= blocks; b += TILE_WIDE) {
#define WIDE(n) tile_scores(bf16, n, TILE_WIDE, depth, x, x_stride, k + b * j->k_block, j->k_block, s + 16 * b, KEYS)
        ROW_CASES(WIDE)
#undef WIDE
    }
    for (; b < blocks; b++) {
#define NARROW(n) tile_scores(bf16, n, 1, depth, x, x_stride, k + b * j->k_block, j->k_block, s + 16 * b, KEYS)
        ROW_CASES(NARROW)
#undef NARROW
    }
}

INLINE void value_rows(const int bf16, const job *j, int rows, const void *p, const uint8_t *v, int64_t blocks,
                       const float *keep, float *o) {
    const int dim = j->layer->head_dim, depth = (int)blocks * 16 / (bf16 ? 2 : 1);
    const int64_t p_stride = bf16 ? KEYS / 2 : KEYS;
    int c = 0;
    for (; c + 16 * TILE_WIDE <= dim; c += 16 * TILE_WIDE) {
#define WIDE(n) tile_values(bf16, n, TILE_WIDE, depth, p, p_stride, v + c * 4, j->v_row, keep, o + c, KV_MAX_DIM)
        ROW_CASES(WIDE)
#undef WIDE
    }
    for (; c < dim; c += 16) {
#define NARROW(n) tile_values(bf16, n, 1, depth, p, p_stride, v + c * 4, j->v_row, keep, o + c, KV_MAX_DIM)
        ROW_CASES(NARROW)
#undef NARROW
    }
}

/* One row of a block: scores to probabilities. Keys outside [low, high) are hidden. Returns what earlier sums keep. */
static float soften(const kv_prefill_call *call, float *s, int64_t count, int64_t low, int64_t high, float *top, float *total,
                    uint16_t *p) {
    v16 best = v_set(*top), sum = v_set(0.0f);
    for (int64_t t = 0; t < count; t += 16) {
        v16 x = v_mul(v_load(s + t), v_set(call->scale));
        if (call->softcap > 0.0f) x = v_softcap(x, call->softcap);
        v_store(s + t, x);
        if (t < low || t + 16 > high) {
            for (int64_t i = t; i < t + 16; i++)
                if (i < low || i >= high) s[i] = -INFINITY;
            x = v_load(s + t);
        }
        best = v_max(best, x);
    }
    const float peak = v_top(best), base = peak == -INFINITY ? 0.0f : peak;
    for (int64_t t = 0; t < count; t += 16) {
        v16 x = v_exp(v_sub(v_load(s + t), v_set(base)));
        sum = v_add(sum, x);
        if (p) v_store_bf16(p + t, x);
        else v_store(s + t, x);
    }
    const float keep = *top == -INFINITY ? 0.0f : expf(*top - base);
    *top = peak;
    *total = *total * keep + v_sum(sum);
    return keep;
}

INLINE void attend_rows(const int bf16, const job *j, int head, int64_t first_row, int rows) {
    const kv_layer *l = j->layer;
    const kv_prefill_call *call = j->call;
    const int dim = l->head_dim, group = call->q_heads / l->kv_heads;
    const int64_t past = j->keys - call->queries;
    uint8_t x[ROWS * KV_MAX_DIM * 4] __attribute__((aligned(64)));
    float s[ROWS * KEYS] __attribute__((aligned(64))), o[ROWS * KV_MAX_DIM] __attribute__((aligned(64)));
    uint16_t p[bf16 ? ROWS * KEYS : 1] __attribute__((aligned(64)));
    float top[ROWS], total[ROWS], keep[ROWS];
    for (int r = 0; r < rows; r++) {
        int64_t at = (first_row + r) / group * call->q_stride + (head * group + (first_row + r) % group) * (int64_t)dim;
        if (bf16) memcpy(x + r * dim * 2, (const uint16_t *)call->q + at, (size_t)dim * 2);
        else
            for (int c = 0; c < dim; c += 16)
                v_store((float *)x + r * dim + c, KV_LOAD16(call->q_kind, (const uint8_t *)call->q, at + c));
        memset(o + r * KV_MAX_DIM, 0, sizeof(float) * (size_t)dim);
        top[r] = -INFINITY;
        total[r] = 0.0f;
    }
    const int64_t x_words = dim / (bf16 ? 2 : 1), end = past + (first_row + rows - 1) / group + 1;
    int64_t start = call->window ? past + first_row / group - call->window + 1 : 0;
    start = start < 0 ? 0 : start / KEYS * KEYS;
    for (int64_t key = start; key < end; key += KEYS) {
        const int64_t left = (end - key + 15) / 16, blocks = left < KEYS / 16 ? left : KEYS / 16;
        const uint8_t *k = j->k + (head * j->blocks + key / 16) * j->k_block;
        const uint8_t *v = j->v + (head * j->blocks * 16 + key) / (bf16 ? 2 : 1) * j->v_row;
        for (int r = 0; r < rows; r += TILE_ROWS)
            score_rows(bf16, j, rows - r < TILE_ROWS ? rows - r : TILE_ROWS, x + r * x_words * 4, x_words, k, blocks,
                       s + r * KEYS);
        for (int r = 0; r < rows; r++) {
            const int64_t position = past + (first_row + r) / group - key; /* of the query, in this block */
            const int64_t low = call->window ? position - call->window + 1 : 0;
            keep[r] = soften(call, s + r * KEYS, blocks * 16, low, position + 1, top + r, total + r, bf16 ? p + r * KEYS : NULL);
        }
        for (int r = 0; r < rows; r += TILE_ROWS)
            value_rows(bf16, j, rows - r < TILE_ROWS ? rows - r : TILE_ROWS,
                       bf16 ? (const void *)(p + r * KEYS) : (const void *)(s + r * KEYS), v, blocks, keep + r,
                       o + r * KV_MAX_DIM);
    }
    for (int r = 0; r < rows; r++) {
        int64_t at = ((first_row + r) / group * call->q_heads + head * group + (first_row + r) % group) * (int64_t)dim;
        v16 scale = v_set(total[r] > 0.0f ? 1.0f / total[r] : 0.0f);
        for (int c = 0; c < dim; c += 16) {
            v16 y = v_mul(v_load(o + r * KV_MAX_DIM + c), scale);
            if (call->q_kind == KV_FP32) v_store((float *)call->out + at + c, y);
            else if (call->q_kind == KV_BF16) v_store_bf16((uint16_t *)call->out + at + c, y);
            else v_store_fp16((uint16_t *)call->out + at + c, y);
        }
    }
}

static void attend_task(void *context, int64_t task, int32_t thread) {
    (void)thread;
    const job *j = context;
    const int64_t all = j->call->queries * (j->call->q_heads / j->layer->kv_heads);
    const int64_t first = (j->tiles - 1 - task % j->tiles) * ROWS; /* the longest first */
    const int head = (int)(task / j->tiles), rows = (int)(all - first < ROWS ? all - first : ROWS);
    if (HAVE_BF16 && j->bf16) attend_rows(HAVE_BF16, j, head, first, rows);
    else attend_rows(0, j, head, first, rows);
}

void kv_prefill(const kv_layer *layer, const kv_prefill_call *call) {
    const int bf16 = use_bf16(layer, call->q_kind);
    job j = {.layer = layer, .call = call, .bf16 = bf16};
    j.keys = call->page_count * layer->block_size + call->tail_length;
    j.blocks = blocks_of(layer, call->page_count, call->tail_length);
    j.k_block = layer->head_dim * (bf16 ? 32 : 64);
    j.v_row = layer->head_dim * 4;
    j.k = call->scratch;
    j.v = call->scratch + j.k_block * j.blocks * layer->kv_heads;
    j.tiles = (call->queries * (call->q_heads / layer->kv_heads) + ROWS - 1) / ROWS;
    kv_parallel(j.blocks * layer->kv_heads, pack_task, &j);
    kv_parallel(j.tiles * layer->kv_heads, attend_task, &j);
}
