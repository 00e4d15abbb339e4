/* Gather: page bytes back to activations [tokens, kv_heads, head_dim], and copies of whole rows. */
#include "attend.h"
#include "decode.h"
#include "lanes.h"
#include "threads.h"

typedef struct {
    const uint8_t *pages;
    const int32_t *ids;
    void *k, *v;
    const float *scales; /* K and V scale of this layer, or NULL */
    int64_t count, token_stride, head_stride; /* of k and v, in elements */
    int32_t kind;
} kv_gather_call;

typedef struct {
    const kv_layer *layer;
    const kv_gather_call *call;
} gather_job;

static void store16(int kind, void *base, int64_t element, v16 x) {
    if (kind == KV_FP32) v_store((float *)base + element, x);
    else if (kind == KV_BF16) v_store_bf16((uint16_t *)base + element, x);
    else v_store_fp16((uint16_t *)base + element, x);
}

static void gather_task(void *context, int64_t task, int32_t thread) {
    (void)thread;
    const gather_job *j = context;
    const kv_layer *l = j->layer;
    const kv_gather_call *call = j->call;
    const int64_t index = task / l->kv_heads, head = task % l->kv_heads;
    const int dim = l->head_dim;
    const uint8_t *page = call->pages + call->ids[index] * l->page_bytes;
    const uint8_t *k = page + l->k.codes + head * l->k.head_codes, *k_scales = page + l->k.scales + head * l->k.head_scales;
    const uint8_t *v = page + l->v.codes + head * l->v.head_codes, *v_scales = page + l->v.scales + head * l->v.head_scales;
    float grid[KV_MAX_DIM][16], row[KV_MAX_DIM];
    for (int from = 0; from < l->block_size; from += 16) {
        decode_k(l, k, k_scales, from, call->scales ? call->scales[0] : 1.0f, grid);
        for (int t = 0; t < 16; t++) {
            int64_t to = (index * l->block_size + from + t) * call->token_stride + head * call->head_stride;
            for (int c = 0; c < dim; c++) row[c] = grid[c][t];
            for (int c = 0; c < dim; c += 16) store16(call->kind, call->k, to + c, v_load(row + c));
            decode_v(l, v, v_scales, from + t, call->scales ? call->scales[1] : 1.0f, row);
            for (int c = 0; c < dim; c += 16) store16(call->kind, call->v, to + c, v_load(row + c));
        }
    }
}

void kv_gather(const kv_layer *layer, const kv_gather_call *call) {
    gather_job j = {layer, call};
    kv_parallel(call->count * layer->kv_heads, gather_task, &j);
}

typedef struct {
    const uint8_t *source;
    uint8_t *target;
    const int32_t *source_ids, *target_ids;
    int64_t row;
} copy_job;

static void copy_task(void *context, int64_t task, int32_t thread) {
    (void)thread;
    const copy_job *j = context;
    memcpy(j->target + j->target_ids[task] * j->row, j->source + j->source_ids[task] * j->row, (size_t)j->row);
}

void kv_copy_rows(const uint8_t *source, uint8_t *target, const int32_t *source_ids, const int32_t *target_ids,
                  int64_t count, int64_t row) {
    copy_job j = {source, target, source_ids, target_ids, row};
    kv_parallel(count, copy_task, &j);
}
