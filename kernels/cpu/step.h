/* A whole forward pass in one call: everything of a Llama-family decoder except where keys and values live. */
#ifndef KV_STEP_H
#define KV_STEP_H

#include <stdint.h>

#include "attend.h"
#include "linear.h"

typedef struct {
    kv_linear qkv, o, gate_up, down;
    const float *input_norm, *post_norm; /* [hidden] */
    const float *q_norm, *k_norm;        /* [head_dim] or NULL */
} kv_decoder_layer;

typedef struct {
    int32_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab;
    int32_t is_bf16;      /* compute dtype: bf16 or float; q, k, v, attended and embed are stored in it */
    int32_t rows_bf16;    /* products read bf16: is_bf16, and the ISA and all weight formats can */
    float eps;
    const void *embed;    /* [vocab, hidden] */
    const float *cos, *sin; /* [context, head_dim / 2] */
    int64_t context;
    const float *norm;    /* [hidden] */
    const kv_decoder_layer *layer;
    kv_linear head;
} kv_model;

/* Writes the new keys and values of one layer and attends: from q, k, v of the step to its `attended`. Nonzero ends the
 * step. */
typedef int32_t (*kv_attention)(void *ctx, int32_t layer);

/* kv_attend_decode of attend.c. */
typedef int32_t (*kv_decode_attention)(const kv_layer *layer, const void *call);

typedef struct {
    int64_t rows, logits;      /* tokens of this step; rows of which logits are wanted */
    const int64_t *tokens, *positions;
    const int64_t *logits_rows;
    float *logits_out;         /* [logits, vocab] */
    void *q, *k, *v, *attended; /* [rows, heads | kv_heads, head_dim], attended as q; compute dtype */
    uint8_t *scratch;          /* kv_step_scratch bytes, 64-byte aligned, zeroed once */
    int64_t capacity;          /* rows the scratch is made for */
    kv_attention attention;    /* used unless `decode` is set */
    void *attention_ctx;
    /* Decode: row r is appended to its tail and attends, without leaving C. */
    kv_decode_attention decode;
    const kv_layer *pool;      /* [layers] */
    const uint8_t *calls;      /* [layers] argument of `decode`, call_bytes each */
    int64_t call_bytes;
    uint8_t *tails;
    const int32_t *append_slots, *append_positions; /* [rows] */
} kv_step;

int64_t kv_step_scratch(const kv_model *m, int64_t capacity);

#define KV_STEP_OUT_OF_RANGE (-2)

/* Returns 0, KV_STEP_OUT_OF_RANGE for a token or position the model does not have (nothing is written then), or what the
 * attention returned. */
int32_t kv_step_run(const kv_model *m, const kv_step *s);

#endif
