/* Decode attention: one query per sequence over its pages and its tail.
 *
 * Work is cut into parts of KV_PART or KV_PART_WIDE tokens of a sequence and a few KV heads; a part whose pages several
 * sequences share is read once for all of them. Parts run on any thread. Within a part: all scores, one softmax, all
 * values, so nothing is rescaled. The thread that finishes the last part of a sequence merges its parts in order. Where
 * a sequence's tokens are cut depends on it alone, and heads have nothing to do with each other, so a row's bits depend
 * neither on its neighbours in the batch nor on the number of threads.
 */
#include <pthread.h>
#include <stdlib.h>

#include "attend_job.h"
#include "threads.h"

#define PART_PAGES_MAX 32     /* KV_PART_WIDE / 16 */
/* Prefetch distances. Pages lie multiples of 4 KiB apart, so one head's codes compete for the same sets of L1: what is
 * prefetched too early is gone when it is wanted. */
#define AHEAD_BYTES 12288
#define AHEAD_BYTES_NEAR 6144 /* fp16 and fp32; bf16 gains from more, with prefetch_again and without */
#define BETWEEN_BYTES 4096    /* of V beyond that, prefetched during the softmax */
#define SMALL_PAGE 4096       /* of the machine */

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

static int32_t pages_of(const kv_job *j, int32_t b, int32_t head) {
    const kv_decode *call = j->call;
    return call->head_counts ? call->head_counts[b * (int64_t)j->layer->kv_heads + head] : call->page_counts[b];
}

/* Pages of one head in the part of sequence b that starts at page `first`. */
static int32_t pages_in_part(const kv_job *j, int32_t b, int32_t head, int32_t first) {
    int64_t count = least(j->part_pages, pages_of(j, b, head) - first);
    return count < 0 ? 0 : (int32_t)count;
}

/* The K segments of a head's pages, then its V segments, at `to`. Prefetches their scales, or touches the codes where there
 * are none: random pages are in no TLB, and walks of page tables that begin together cost hardly more than one, while each
 * alone would hold up a stream of prefetches. */
static void list_segments(const kv_job *j, int32_t b, int32_t head, int32_t first, int32_t count, kv_segment *to) {
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
        for (int64_t at = 0; !layer->k.head_scales && at < layer->k.head_codes; at += SMALL_PAGE) PREFETCH(to[i].codes + at);
        for (int64_t at = 0; !layer->v.head_scales && at < layer->v.head_codes; at += SMALL_PAGE)
            PREFETCH(to[count + i].codes + at);
        for (int64_t at = 0; at < layer->k.head_scales; at += 64) PREFETCH(to[i].scales + at);
        for (int64_t at = 0; at < layer->v.head_scales; at += 64) PREFETCH(to[count + i].scales + at);
    }
}

/* Where a task reads: `count` pages from the `first` of sequence b, for a block of heads. */
typedef struct {
    const kv_pass *pass;
    int32_t b, first, first_head, end_head, count;
} place;

static place place_of(const kv_job *j, int64_t task) {
    place x = {.pass = j->passes + task / j->blocks, .first_head = (int32_t)(task % j->blocks) * j->block_heads};
    x.end_head = (int32_t)least(x.first_head + j->block_heads, j->layer->kv_heads);
    x.b = j->members[x.pass->first];
    x.first = first_page(j, x.b, x.pass->part);
    x.count = pages_in_part(j, x.b, x.first_head, x.first);
    return x;
}

static void run_pass(void *context, int64_t task, int32_t thread) {
    (void)thread;
    const kv_job *j = context;
    const kv_layer *layer = j->layer;
    const int32_t block = (int32_t)(task % j->blocks);
    const place at = place_of(j, task);
    const kv_pass *pass = at.pass;
    const int group = j->call->q_heads / layer->kv_heads;
    const int64_t later = task + kv_threads(); /* probably the next one of this thread */

    kv_segment order[2][3 * PART_PAGES_MAX]; /* K, V of a head, then room for the next head's first K */
    int32_t count = 0, next = at.count;
    list_segments(j, at.b, at.first_head, at.first, next, order[0]);
    const int near = layer->k.kind == KV_FP16 || layer->k.kind == KV_FP32;
    int64_t distance = (near ? AHEAD_BYTES_NEAR : AHEAD_BYTES) / layer->k.head_codes;
    distance = distance < 2 ? 2 : distance; /* segments */
    if (task < kv_threads())
        for (int64_t i = 0; i < least(distance, next); i++)
            for (int64_t c = 0; c < layer->k.head_codes; c += 64) PREFETCH(order[0][i].codes + c);
    for (int32_t head = at.first_head; head < at.end_head; head++) {
        kv_segment *mine = order[(head - at.first_head) % 2], *after = order[(head - at.first_head + 1) % 2];
        count = next;
        next = 0;
        if (head + 1 < at.end_head) {
            next = pages_in_part(j, at.b, head + 1, at.first);
            list_segments(j, at.b, head + 1, at.first, next, after);
        } else if (later < (int64_t)j->pass_count * j->blocks) {
            const place to = place_of(j, later);
            next = to.count;
            list_segments(j, to.b, to.first_head, to.first, next, after);
        }
        const int32_t reach = (int32_t)least(distance, count);
        const int32_t waiting = (int32_t)least(BETWEEN_BYTES / layer->v.head_codes, count - reach);
        const kv_segment *v_ahead = mine + count + reach + waiting;
        const int32_t beyond = reach + waiting > KV_AGAIN ? reach + waiting : KV_AGAIN;
        for (int32_t i = 0; count && i < beyond; i++) /* the last `waiting` again: the next head goes on from `reach` */
            mine[2 * count + i] = next ? after[least(least(i, reach - 1), next - 1)] : mine[2 * count - 1];
        kv_piece w = {head, count, waiting, mine, mine + count, mine + reach, mine + count + reach, v_ahead};
        kv_attend_piece(j, pass, &w);
    }
    for (int32_t i = 0; i < pass->count; i++) {
        const int32_t member = j->members[pass->first + i];
        _Atomic int32_t *left = &j->left[member * j->blocks + block];
        if (atomic_fetch_sub_explicit(left, 1, memory_order_acq_rel) == 1)
            for (int32_t head = at.first_head * group; head < at.end_head * group; head++) kv_merge_parts(j, member, head);
    }
}

/* Parts of sequence b: at least one, so that its output is written, unless it has no query. */
static int32_t count_parts(const kv_job *j, int32_t b) {
    if (j->call->query_starts[b + 1] == j->call->query_starts[b]) return 0;
    int32_t pages = 0;
    for (int32_t h = 0; h < (j->call->head_counts ? j->layer->kv_heads : 1); h++) {
        int32_t found = pages_of(j, b, h);
        pages = found > pages ? found : pages;
    }
    pages -= pages_hidden(j, b);
    return pages <= j->part_pages ? 1 : (pages + j->part_pages - 1) / j->part_pages;
}

/* Heads of a task: a few, because those of one page lie together; one if there are few parts (counted before sequences
 * share them) for the threads. */
static void share_out_heads(kv_job *j, size_t parts) {
    const int32_t heads = j->layer->kv_heads;
    int64_t some = least(256 / j->layer->head_dim, heads);
    if (parts * (size_t)heads < 4 * (size_t)kv_threads()) some = 1;
    j->block_heads = some < 1 ? 1 : (int32_t)some;
    j->blocks = (heads + j->block_heads - 1) / j->block_heads;
}

/* Returns 0, or -1 if there is no memory for partial results. */
int32_t kv_attend_decode(const kv_layer *layer, const kv_decode *call) {
    const int32_t n = call->sequences;
    const int wide = layer->k.kind <= KV_FP16 && layer->v.kind <= KV_FP16;
    kv_job j = {.layer = layer, .call = call, .part_pages = (wide ? KV_PART_WIDE : KV_PART) / layer->block_size};
    size_t parts = 0;
    for (int32_t b = 0; b < n; b++) parts += (size_t)count_parts(&j, b);
    share_out_heads(&j, parts);
    const size_t sequences = (size_t)n, left = sequences * (size_t)j.blocks;
    const size_t words = sequences + 1 + left + parts + sequences + 3 * parts; /* part_start, left, members, passes */
    const size_t index_bytes = (words * sizeof(int32_t) + 63) / 64 * 64;
    char *memory = arena_get(index_bytes + sizeof(float) * parts * (size_t)call->q_heads * (size_t)(layer->head_dim + 2));
    if (!memory) return -1;
    j.part_start = (int32_t *)memory;
    j.left = (_Atomic int32_t *)(j.part_start + n + 1);
    j.members = j.part_start + n + 1 + left;
    j.passes = (kv_pass *)(j.members + parts + n);
    j.partial = (float *)(memory + index_bytes);
    j.part_start[0] = 0;
    for (int32_t b = 0; b < n; b++) {
        const int32_t mine = count_parts(&j, b);
        j.part_start[b + 1] = j.part_start[b] + mine;
        for (int32_t k = 0; k < j.blocks; k++) atomic_init(&j.left[b * j.blocks + k], mine);
    }
    kv_plan_passes(&j);
    if (call->page_lse)
        for (int64_t i = 0; i < (int64_t)n * call->q_heads * call->max_pages; i++) call->page_lse[i] = -INFINITY;
    kv_parallel((int64_t)j.pass_count * j.blocks, run_pass, &j);
    return 0;
}
