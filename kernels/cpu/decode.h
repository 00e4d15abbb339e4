/* Decode stored K and V to fp32, shared by gather and prefill. */
#ifndef KV_DECODE_H
#define KV_DECODE_H

#include "attend.h"
#include "lanes.h"

/* Channels of sixteen tokens, `from` the first: grid[channel][token]. */
static void decode_k(const kv_layer *l, const uint8_t *codes, const uint8_t *scales, int from, float tensor_scale,
                     float grid[KV_MAX_DIM][16]) {
    const int dim = l->head_dim, half = dim / 2, tokens = l->block_size, kind = l->k.kind;
    if (kind == KV_I4) {
        for (int c = 0; c < half; c++) {
            v16 low, high;
            v_load_nibbles(codes + c * tokens + from, &low, &high);
            v16 z = v_set((float)(int8_t)scales[dim + c]), zh = v_set((float)(int8_t)scales[dim + half + c]);
            v_store(grid[c], v_mul(v_sub(low, z), v_set(f_e5m3(scales[c]))));
            v_store(grid[half + c], v_mul(v_sub(high, zh), v_set(f_e5m3(scales[half + c]))));
        }
        return;
    }
    float scale[KV_MAX_DIM], centre[KV_MAX_DIM];
    v16 unit = v_set(kv_unit(kind) * (l->k.scaling == KV_PER_TENSOR ? tensor_scale : 1.0f));
    if (l->k.scaling == KV_PER_TOKEN) unit = v_mul(unit, v_load_fp16((const uint16_t *)scales + from));
    if (l->k.scaling == KV_PER_CHANNEL)
        for (int c = 0; c < dim; c += 16) {
            v_store(scale + c, v_load_fp16((const uint16_t *)scales + c));
            v_store(centre + c, v_load_fp16((const uint16_t *)scales + dim + c));
        }
    for (int c = 0; c < dim; c++) {
        v16 x = KV_LOAD16(kind, codes, c * tokens + from);
        if (l->k.scaling == KV_PER_CHANNEL) x = v_add(v_mul(x, v_set(scale[c])), v_set(centre[c]));
        else if (l->k.scaling != KV_NONE) x = v_mul(x, unit);
        v_store(grid[c], x);
    }
}

/* One token of V. */
static void decode_v(const kv_layer *l, const uint8_t *codes, const uint8_t *scales, int token, float tensor_scale,
                     float *row) {
    const int dim = l->head_dim, half = dim / 2, tokens = l->block_size, kind = l->v.kind;
    if (kind == KV_I4) {
        const int groups = 2 * ((half + 31) / 32);
        const uint8_t *zeros = scales + groups * tokens, *byte = codes + token * half;
        for (int c = 0; c < half; c++) {
            int low = c / 32 * tokens + token, high = low + groups / 2 * tokens;
            row[c] = ((float)(byte[c] & 15) - (float)(int8_t)zeros[low]) * f_e5m3(scales[low]);
            row[half + c] = ((float)(byte[c] >> 4) - (float)(int8_t)zeros[high]) * f_e5m3(scales[high]);
        }
        return;
    }
    float unit = kv_unit(kind) * (l->v.scaling == KV_PER_TENSOR ? tensor_scale : 1.0f);
    if (l->v.scaling == KV_PER_TOKEN) {
        float all[16];
        v_store(all, v_load_fp16((const uint16_t *)scales + token / 16 * 16));
        unit *= all[token % 16];
    }
    for (int c = 0; c < dim; c += 16) v_store(row + c, v_mul(KV_LOAD16(kind, codes, token * dim + c), v_set(unit)));
}

/* One row of a tail. */
static inline void decode_tail(const kv_layer *l, const uint8_t *side, int64_t row_index, float *row) {
    const int dim = l->head_dim, kind = l->tail_kind;
    for (int c = 0; c < dim; c += 16) v_store(row + c, KV_LOAD16(kind, side, row_index * dim + c));
}

#endif
