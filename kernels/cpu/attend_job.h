/* One decode call as its files see it: attend_passes.c plans who reads what, attend.c shares it out among threads,
 * attend_rows.c computes and merges. */
#ifndef KV_ATTEND_JOB_H
#define KV_ATTEND_JOB_H

#include <stdatomic.h>

#include "attend.h"
#include "lanes.h"

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

/* Part `part` of the sequences members[first .. first + count), whose pages in it are the same. */
typedef struct {
    int32_t first, count, part;
} kv_pass;

typedef struct {
    const kv_layer *layer;
    const kv_decode *call;
    int32_t *part_start;   /* [sequences + 1] parts before each sequence */
    int32_t *members;      /* [parts] */
    kv_pass *passes;       /* [pass_count] */
    _Atomic int32_t *left; /* [sequences * blocks] unfinished parts */
    float *partial;        /* [parts, q_heads, head_dim + 2]: sums, top score, total */
    int32_t blocks, block_heads, part_pages, pass_count, member_count;
} kv_job;

/* One KV head of the pages of a pass: `count` segments a list, `waiting` of them in `between`, which are prefetched
 * while scores become probabilities and nothing else is read. */
typedef struct {
    int32_t head, count, waiting;
    const kv_segment *k, *v, *k_ahead, *between, *v_ahead;
} kv_piece;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Pages before the window of sequence b, which nobody needs to read. */
static inline int32_t pages_hidden(const kv_job *j, int32_t b) {
    const kv_decode *call = j->call;
    if (!call->window) return 0;
    int64_t length = (int64_t)call->page_counts[b] * j->layer->block_size + call->tail_lengths[b];
    int64_t hidden = (length - call->window) / j->layer->block_size;
    return hidden < 0 ? 0 : (int32_t)least(hidden, call->page_counts[b]);
}

/* The first page of part `part` of sequence b, as an index into its table. */
static inline int32_t first_page(const kv_job *j, int32_t b, int32_t part) {
    return pages_hidden(j, b) + part * j->part_pages;
}

static inline int32_t part_count(const kv_job *j, int32_t b) { return j->part_start[b + 1] - j->part_start[b]; }

/* attend_rows.c: partial results of one piece for every query head of every member of the pass. */
void kv_attend_piece(const kv_job *j, const kv_pass *pass, const kv_piece *piece);

/* attend_rows.c: the normalised output of one query head from the parts of its sequence. */
void kv_merge_parts(const kv_job *j, int32_t b, int32_t head);

/* attend_passes.c: cuts the parts of all sequences into passes; needs part_start, fills members and passes. */
void kv_plan_passes(kv_job *j);

#endif
