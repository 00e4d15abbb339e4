/* Decode attention: one query per sequence over its pages and its tail.
 *
 * Work is cut into parts of KV_PART tokens of one sequence and a few KV heads; parts run on any thread. Within a part: all
 * scores, one softmax, all values, so nothing is rescaled. The thread that finishes the last part of a sequence merges
 * its parts in order. Where cuts are depends on the sequence alone, so a row's bits depend neither on its neighbours in
 * the batch nor on the number of threads.
 */
#include "attend.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "lanes.h"
#include "threads.h"

#define PART_PAGES_MAX 16     /* KV_PART / 16 */
#define AHEAD_BYTES 8192      /* prefetch distance */
#define TAIL_MAX 32

typedef struct {
    const uint8_t *pages, *tails;
    const void *q;
    void *out;
    const int32_t *tables, *page_counts, *tail_slots, *tail_lengths, *query_starts;
    const int32_t *head_tables, *head_counts; /* the sparse path, or NULL */
    const float *scales;                      /* K and V scale of this layer, or NULL */
    float *page_lse;                          /* [sequences, q_heads, max_pages], or NULL */
    int64_t q_stride;                         /* elements from one token of q to the next; out is contiguous */
    int32_t q_kind, sequences, q_heads, table_stride, max_pages, window;
    float scale, softcap;
} kv_decode;

typedef struct {
    const kv_layer *layer;
    const kv_decode *call;
    const int32_t *part_start; /* [sequences + 1] parts before each sequence */
    _Atomic int32_t *left;     /* [sequences * blocks] unfinished parts */
    float *partial;            /* [parts, q_heads, head_dim + 2]: sums, top score, total */
    int32_t blocks, block_heads, part_pages;
} job;

/* Scratch of a calling thread, kept because fresh memory of this size would be paged in at every call. */
typedef struct {
    void *memory;
    size_t size;
} arena;
static pthread_key_t arena_key;
static pthread_once_t arena_once = PTHREAD_ONCE_INIT;
static void arena_free(void *a) {
    free(((arena *)a)->memory);
    free(a);
}
static void arena_init(void) { pthread_key_create(&arena_key, arena_free); }
static void *arena_get(size_t size) {
    pthread_once(&arena_once, arena_init);
    arena *a = pthread_getspecific(arena_key);
    if (!a) {
        a = calloc(1, sizeof *a);
        if (!a) return NULL;
        pthread_setspecific(arena_key, a);
    }
    if (a->size < size) {
        free(a->memory);
        a->memory = malloc(size);
        a->size = a->memory ? size : 0;
    }
    return a->memory;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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

/* Scores to probabilities relative to the part's top; returns the top, the sum in *total. count is a multiple of 16. */
static float softmax(float *s, int64_t count, float *total) {
    v16 top = v_set(-INFINITY), sum = v_set(0.0f);
    for (int64_t t = 0; t < count; t += 16) top = v_max(top, v_load(s + t));
    float peak = v_top(top);
    v16 base = v_set(peak == -INFINITY ? 0.0f : peak);
    for (int64_t t = 0; t < count; t += 16) {
        v16 p = v_exp(v_sub(v_load(s + t), base));
        sum = v_add(sum, p);
        v_store(s + t, p);
    }
    *total = v_sum(sum);
    return peak;
}

static float page_log_sum_exp(const float *s, int tokens) {
    float held[32], total;
    memcpy(held, s, sizeof(float) * (size_t)tokens);
    float top = softmax(held, tokens, &total);
    return top + logf(total);
}

static void merge(const job *j, int32_t b, int32_t head) {
    const kv_decode *call = j->call;
    const int dim = j->layer->head_dim;
    const int64_t row = call->q_heads * (int64_t)(dim + 2);
    const float *part = j->partial + j->part_start[b] * row + head * (int64_t)(dim + 2);
    const int32_t parts = j->part_start[b + 1] - j->part_start[b];
    float top = -INFINITY, total = 0.0f, sum[KV_MAX_DIM] = {0};
    for (int32_t i = 0; i < parts; i++) top = fmaxf(top, part[i * row + dim]);
    for (int32_t i = 0; i < parts; i++) {
        const float *x = part + i * row;
        if (x[dim] == -INFINITY) continue;
        float weight = expf(x[dim] - top);
        total += weight * x[dim + 1];
        for (int c = 0; c < dim; c += 16) v_store(sum + c, v_fma(v_load(x + c), v_set(weight), v_load(sum + c)));
    }
    int64_t to = (call->query_starts[b] * (int64_t)call->q_heads + head) * dim;
    store_row(call->q_kind, call->out, to, dim, sum, total > 0.0f ? 1.0f / total : 0.0f);
}

/* One KV head of one part: pages first .. first + count of the table, and the tail if `tail` tokens are given. */
typedef struct {
    int32_t b, head, first, count, tail;
    const kv_segment *k, *v, *k_ahead, *v_ahead;
    float *partial; /* of q head 0 of this part */
} piece;

static void attend_piece(const job *j, const piece *w) {
    const kv_decode *call = j->call;
    const kv_layer *layer = j->layer;
    const int dim = layer->head_dim, tokens = layer->block_size, group = call->q_heads / layer->kv_heads;
    const int tiles = (group + KV_ROWS - 1) / KV_ROWS;
    const int64_t sealed = (int64_t)w->count * tokens, all = (sealed + w->tail + 15) / 16 * 16;
    const int64_t row = call->query_starts[w->b];
    const int rounded = call->q_kind != KV_FP32; /* activations carry at most eleven significant bits */
    const float k_scale = call->scales ? call->scales[0] : 1.0f, v_scale = call->scales ? call->scales[1] : 1.0f;
    const uint8_t *tail = NULL;
    if (w->tail) tail = call->tails + call->tail_slots[w->b] * layer->tail_bytes;
    const int64_t tail_head = w->head * kv_width(layer->tail_kind, (int64_t)tokens * dim);

    float q[KV_ROWS * KV_MAX_DIM], o[KV_ROWS * KV_MAX_DIM], s[KV_ROWS][KV_PART + TAIL_MAX];
    for (int t = 0, done = 0; t < tiles; t++) {
        const int rows = (group - done) / (tiles - t), head = w->head * group + done;
        done += rows;
        for (int r = 0; r < rows; r++) {
            load_row(call->q_kind, call->q, row * call->q_stride + (head + r) * (int64_t)dim, dim, call->scale,
                     q + r * KV_MAX_DIM);
            memset(o + r * KV_MAX_DIM, 0, sizeof(float) * (size_t)dim);
        }
        if (!rounded || !kv_scores_int8(layer, rows, w->count, w->k, w->k_ahead, q, s[0], KV_PART + TAIL_MAX))
            kv_scores(layer, rows, w->count, w->k, w->k_ahead, q, k_scale, s[0], KV_PART + TAIL_MAX);
        if (w->tail)
            kv_tail_scores(layer, rows, w->tail, tail + layer->tail_k + tail_head, q, s[0] + sealed, KV_PART + TAIL_MAX);
        int64_t hidden = 0; /* keys of this part that the window hides */
        if (call->window) {
            int64_t length = (int64_t)call->page_counts[w->b] * tokens + call->tail_lengths[w->b];
            hidden = length - call->window - (int64_t)w->first * tokens;
        }
        for (int r = 0; r < rows; r++) {
            float *part = w->partial + (head + r) * (int64_t)(dim + 2);
            if (call->softcap > 0.0f)
                for (int64_t i = 0; i < all; i += 16) v_store(s[r] + i, v_softcap(v_load(s[r] + i), call->softcap));
            for (int64_t i = 0; i < least(hidden, all); i++) s[r][i] = -INFINITY;
            for (int64_t i = sealed + w->tail; i < all; i++) s[r][i] = -INFINITY;
            if (call->page_lse) {
                float *lse = call->page_lse + (w->b * (int64_t)call->q_heads + head + r) * call->max_pages + w->first;
                for (int32_t i = 0; i < w->count; i++) lse[i] = page_log_sum_exp(s[r] + i * tokens, tokens);
            }
            part[dim] = softmax(s[r], all, part + dim + 1);
        }
        kv_values(layer, rows, w->count, w->v, w->v_ahead, s[0], KV_PART + TAIL_MAX, v_scale, o);
        if (w->tail)
            kv_tail_values(layer, rows, w->tail, tail + layer->tail_v + tail_head, s[0] + sealed, KV_PART + TAIL_MAX, o);
        for (int r = 0; r < rows; r++)
            memcpy(w->partial + (head + r) * (int64_t)(dim + 2), o + r * KV_MAX_DIM, sizeof(float) * (size_t)dim);
    }
}

/* The piece's K segments, then its V segments, at `to`. */
static void list_segments(const job *j, int32_t b, int32_t head, int32_t first, int32_t count, kv_segment *to) {
    const kv_decode *call = j->call;
    const kv_layer *layer = j->layer;
    const int32_t *ids = call->head_tables
                             ? call->head_tables + (b * (int64_t)layer->kv_heads + head) * call->table_stride
                             : call->tables + b * (int64_t)call->table_stride;
    for (int32_t i = 0; i < count; i++) {
        const uint8_t *page = call->pages + ids[first + i] * layer->page_bytes;
        to[i].codes = page + layer->k.codes + head * layer->k.head_codes;
        to[i].scales = page + layer->k.scales + head * layer->k.head_scales;
        to[count + i].codes = page + layer->v.codes + head * layer->v.head_codes;
        to[count + i].scales = page + layer->v.scales + head * layer->v.head_scales;
        for (int64_t at = 0; at < layer->v.head_scales; at += 64) PREFETCH(to[count + i].scales + at);
    }
}

static int32_t pages_of(const kv_decode *call, const kv_layer *layer, int32_t b, int32_t head) {
    return call->head_counts ? call->head_counts[b * (int64_t)layer->kv_heads + head] : call->page_counts[b];
}

/* Pages before the window of sequence b, which nobody needs to read. */
static int32_t pages_hidden(const kv_decode *call, const kv_layer *layer, int32_t b) {
    if (!call->window) return 0;
    int64_t length = (int64_t)call->page_counts[b] * layer->block_size + call->tail_lengths[b];
    int64_t hidden = (length - call->window) / layer->block_size;
    return hidden < 0 ? 0 : (int32_t)least(hidden, call->page_counts[b]);
}

static void run_part(void *context, int64_t task, int32_t thread) {
    (void)thread;
    const job *j = context;
    const kv_decode *call = j->call;
    const kv_layer *layer = j->layer;
    const int32_t block = (int32_t)(task % j->blocks), index = (int32_t)(task / j->blocks);
    int32_t low = 0, high = call->sequences - 1; /* the sequence that part `index` belongs to */
    while (low < high) {
        int32_t middle = (low + high + 1) / 2;
        if (j->part_start[middle] <= index) low = middle;
        else high = middle - 1;
    }
    const int32_t b = low, part = index - j->part_start[b], parts = j->part_start[b + 1] - j->part_start[b];
    const int32_t first_head = block * j->block_heads;
    const int32_t end_head = (int32_t)least(first_head + j->block_heads, layer->kv_heads);
    const int32_t first = pages_hidden(call, layer, b) + part * j->part_pages;
    const int group = call->q_heads / layer->kv_heads;

    kv_segment order[2][3 * PART_PAGES_MAX + 1]; /* K, V of a head, then room for the next head's first K */
    int32_t count = 0, next = (int32_t)least(j->part_pages, pages_of(call, layer, b, first_head) - first);
    next = next < 0 ? 0 : next;
    list_segments(j, b, first_head, first, next, order[0]);
    int64_t distance = AHEAD_BYTES / layer->k.head_codes;
    distance = distance < 1 ? 1 : distance;
    for (int64_t i = 0; i < least(distance, next); i++)
        for (int64_t at = 0; at < layer->k.head_codes; at += 64) PREFETCH(order[0][i].codes + at);
    for (int32_t head = first_head; head < end_head; head++) {
        kv_segment *mine = order[(head - first_head) % 2], *after = order[(head - first_head + 1) % 2];
        count = next;
        next = 0;
        if (head + 1 < end_head) {
            next = (int32_t)least(j->part_pages, pages_of(call, layer, b, head + 1) - first);
            next = next < 0 ? 0 : next;
            list_segments(j, b, head + 1, first, next, after);
        }
        int32_t reach = (int32_t)least(distance, count);
        for (int32_t i = 0; i < reach; i++) mine[2 * count + i] = next ? after[least(i, next - 1)] : mine[2 * count - 1];
        piece w = {b, head, first, count, part + 1 == parts ? call->tail_lengths[b] : 0, mine, mine + count, mine + reach,
                   mine + count + reach, j->partial + index * (call->q_heads * (int64_t)(layer->head_dim + 2))};
        attend_piece(j, &w);
    }
    if (atomic_fetch_sub_explicit(&j->left[b * j->blocks + block], 1, memory_order_acq_rel) == 1)
        for (int32_t head = first_head * group; head < end_head * group; head++) merge(j, b, head);
}

/* Returns 0, or -1 if there is no memory for partial results. */
int32_t kv_attend_decode(const kv_layer *layer, const kv_decode *call) {
    const int32_t n = call->sequences;
    job j = {.layer = layer, .call = call, .part_pages = KV_PART / layer->block_size};
    j.block_heads = 256 / layer->head_dim; /* heads of one page lie together; few heads leave parts to share out */
    if (j.block_heads < 1) j.block_heads = 1;
    if (j.block_heads > layer->kv_heads) j.block_heads = layer->kv_heads;
    j.blocks = (layer->kv_heads + j.block_heads - 1) / j.block_heads;

    int64_t parts = 0;
    for (int32_t b = 0; b < n; b++) parts += pages_of(call, layer, b, 0) / j.part_pages + 1;
    if (call->head_counts) parts = (int64_t)n * (call->max_pages / j.part_pages + 1);
    const size_t index_bytes = sizeof(int32_t) * (size_t)(n + 1), left_bytes = sizeof(int32_t) * (size_t)n * (size_t)j.blocks;
    char *memory = arena_get(index_bytes + left_bytes + sizeof(float) * (size_t)(parts * call->q_heads) *
                                                           (size_t)(layer->head_dim + 2) + 128);
    if (!memory) return -1;
    int32_t *start = (int32_t *)memory;
    j.part_start = start;
    j.left = (_Atomic int32_t *)(memory + index_bytes);
    j.partial = (float *)(memory + (index_bytes + left_bytes + 63) / 64 * 64);
    start[0] = 0;
    for (int32_t b = 0; b < n; b++) {
        int32_t pages = 0;
        for (int32_t h = 0; h < (call->head_counts ? layer->kv_heads : 1); h++) {
            int32_t found = pages_of(call, layer, b, h);
            pages = found > pages ? found : pages;
        }
        pages -= pages_hidden(call, layer, b);
        int32_t mine = (pages + j.part_pages - 1) / j.part_pages;
        if (mine < 1) mine = 1;
        if (call->query_starts[b + 1] == call->query_starts[b]) mine = 0;
        start[b + 1] = start[b] + mine;
        for (int32_t k = 0; k < j.blocks; k++) atomic_init(&j.left[b * j.blocks + k], mine);
    }
    if (call->page_lse)
        for (int64_t i = 0; i < (int64_t)n * call->q_heads * call->max_pages; i++) call->page_lse[i] = -INFINITY;
    kv_parallel((int64_t)start[n] * j.blocks, run_part, &j);
    return 0;
}
