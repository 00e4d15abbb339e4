/* One panel (32 outputs) times some rows; the inner part of linear.c, which describes the bytes. */
#ifndef KV_LINEAR_PANEL_H
#define KV_LINEAR_PANEL_H

#include "linear.h"

/* Up to so many rows, weights are decoded in registers at each use; beyond, once into a buffer in the L1 cache. */
#define KV_SMALL_ROWS 16

/* Groups decoded at a time: 9 × 2 blocks × 1 KiB of bf16 leave room in the L1 cache for the rows. */
#define KV_CHUNK_GROUPS 9

KV_INLINE int64_t kv_group_bytes(int32_t format) {
    return format == KV_W_F32 ? 2048 : format == KV_W_BF16 ? 1024 : format == KV_W_Q8 ? 576 : 320;
}

/* tile [rows][2 blocks][16] = rows first … first+rows-1 of x times the panel. */
void kv_panel_float(const kv_linear *w, const kv_rows *x, int64_t panel, int64_t first, int64_t rows, float *tile);
void kv_panel_bf16(const kv_linear *w, const kv_rows *x, int64_t panel, int64_t first, int64_t rows, float *tile);

#endif
