/* Append tokens to tails: copies of head_dim elements. */
#include <string.h>

#include "attend.h"

typedef struct {
    uint8_t *tails;
    const int32_t *slots, *positions;
    const void *k, *v;
    int64_t count, k_stride, v_stride; /* elements from token to token; heads are head_dim apart */
} kv_append_call;

void kv_append_tails(const kv_layer *l, const kv_append_call *call) {
    const size_t row = (size_t)kv_width(l->tail_kind, l->head_dim);
    for (int64_t i = 0; i < call->count; i++) {
        uint8_t *tail = call->tails + call->slots[i] * l->tail_bytes;
        const uint8_t *k = (const uint8_t *)call->k + kv_width(l->tail_kind, i * call->k_stride);
        const uint8_t *v = (const uint8_t *)call->v + kv_width(l->tail_kind, i * call->v_stride);
        for (int64_t head = 0; head < l->kv_heads; head++) {
            size_t to = (size_t)(head * l->block_size + call->positions[i]) * row;
            memcpy(tail + l->tail_k + to, k + (size_t)head * row, row);
            memcpy(tail + l->tail_v + to, v + (size_t)head * row, row);
        }
    }
}
