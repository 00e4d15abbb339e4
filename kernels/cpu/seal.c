/* Seal: activations to page bytes, one task per page and layer. Byte for byte what formats/<name>.py defines, which also has
 * the formulas; arithmetic is fp32 in the same order, without contraction. */
#include <stddef.h>

#include "attend.h"
#include "lanes.h"
#include "threads.h"

/* Activations of one KV head: element c of token t is at base + t * stride + c, in elements of `kind`. */
typedef struct {
    const void *base;
    int64_t stride;
    int32_t kind;
} rows_in;

static const float *widen(const rows_in *x, int64_t token, int dim, float *to) {
    const uint8_t *base = x->base;
    for (int c = 0; c < dim; c += 16) v_store(to + c, KV_LOAD16(x->kind, base, token * x->stride + c));
    return to;
}

/* fp16_up of formats/_codes.py for sixteen values, which become the rounded scales. */
static void fp16_up16(float *x, uint16_t *bits) {
    float near[16];
    for (int i = 0; i < 16; i++) near[i] = x[i] > 65504.0f ? 65504.0f : x[i];
    v_store_fp16(bits, v_load(near));
    v_store(near, v_load_fp16(bits));
    for (int i = 0; i < 16; i++) {
        uint32_t up = bits[i] + (near[i] < x[i] ? 1u : 0u);
        bits[i] = (uint16_t)(up < 1 ? 1 : up > 0x7bff ? 0x7bff : up);
    }
    v_store(x, v_load_fp16(bits));
}

static float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

/* Rounds |x| to a float of `mantissa` bits with exponent bias `bias`; below the smallest normal in steps of `step`. */
static uint8_t small_float(float x, int mantissa, int bias, float normal, float step) {
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = bits >> 24 & 0x80;
    bits &= 0x7fffffff;
    if (fabsf(x) < normal) return (uint8_t)(sign | (uint32_t)(int32_t)rintf(fabsf(x) / step));
    int drop = 23 - mantissa;
    bits += (1u << (drop - 1)) - 1 + (bits >> drop & 1);
    return (uint8_t)(sign | ((bits >> drop) - ((uint32_t)(127 - bias) << mantissa)));
}

static float top_of(int kind) { return kind == KV_I8 ? 127.0f : kind == KV_E4M3 ? 448.0f : 57344.0f; }

static void encode(int kind, const float *ratio, int count, uint8_t *to) {
    if (kind == KV_I8)
        for (int i = 0; i < count; i++) to[i] = (uint8_t)(int8_t)clamp(rintf(ratio[i]), -127.0f, 127.0f);
    else if (kind == KV_E4M3)
        for (int i = 0; i < count; i++) to[i] = small_float(clamp(ratio[i], -448.0f, 448.0f), 3, 7, 0x1p-6f, 0x1p-9f);
    else
        for (int i = 0; i < count; i++)
            to[i] = small_float(clamp(ratio[i], -57344.0f, 57344.0f), 2, 15, 0x1p-14f, 0x1p-16f);
}

/* Saturates; NaN stays NaN (v_min and v_max return their second operand then). */
static void encode_raw(int kind, const float *x, int count, uint8_t *to) {
    const float top = kind == KV_FP16 ? 65504.0f : 0x1.fep127f;
    for (int c = 0; c < count; c += 16) {
        v16 v = v_load(x + c), held = v_max(v_set(-top), v_min(v_set(top), v));
        if (kind == KV_FP32) v_store((float *)to + c, v);
        else if (kind == KV_BF16) v_store_bf16((uint16_t *)to + c, held);
        else v_store_fp16((uint16_t *)to + c, held);
    }
}

/* One token: row to codes (token-major), scale to scales[token] where the format has one. */
static void encode_token(const kv_side *side, const float *x, int dim, int token, float tensor_scale, uint8_t *codes,
                         uint8_t *scales) {
    if (side->kind <= KV_FP16) {
        encode_raw(side->kind, x, dim, codes);
        return;
    }
    float ratio[KV_MAX_DIM], scale[16] = {tensor_scale};
    if (side->scaling == KV_PER_TOKEN) {
        v16 top = v_set(0.0f);
        for (int c = 0; c < dim; c += 16) top = v_max(top, v_max(v_load(x + c), v_sub(v_set(0.0f), v_load(x + c))));
        uint16_t bits[16];
        scale[0] = v_top(top) / top_of(side->kind);
        fp16_up16(scale, bits);
        memcpy(scales + 2 * token, bits, 2);
    }
    for (int c = 0; c < dim; c++) ratio[c] = x[c] / scale[0];
    encode(side->kind, ratio, dim, codes);
}

/* Scale byte and zero of a range (formats/int4.py). */
static uint8_t range4(float low, float high, float *scale, float *zero) {
    float need = (high - low) / 15.0f, below = low / -127.0f, above = low / 128.0f;
    need = fmaxf(need, fmaxf(below, above));
    uint32_t bits;
    memcpy(&bits, &need, 4);
    int32_t byte = ((int32_t)(bits + 0xfffff) >> 20) - (103 << 3);
    byte = byte < 0 ? 0 : byte > 255 ? 255 : byte;
    *scale = f_e5m3((uint8_t)byte);
    *zero = clamp(rintf(-low / *scale), -128.0f, 127.0f);
    return (uint8_t)byte;
}

static uint8_t code4(float x, float scale, float zero) { return (uint8_t)clamp(rintf(x / scale) + zero, 0.0f, 15.0f); }

static void encode4_token(const float *x, int dim, int tokens, int token, uint8_t *codes, uint8_t *scales) {
    const int half = dim / 2, groups = 2 * ((half + 31) / 32);
    uint8_t four[KV_MAX_DIM];
    for (int g = 0; g < groups; g++) {
        int first = g < groups / 2 ? g * 32 : half + (g - groups / 2) * 32, end = g < groups / 2 ? half : dim;
        if (end > first + 32) end = first + 32;
        float low = x[first], high = x[first], scale, zero;
        for (int c = first; c < end; c++) low = x[c] < low ? x[c] : low, high = x[c] > high ? x[c] : high;
        scales[g * tokens + token] = range4(low, high, &scale, &zero);
        scales[(groups + g) * tokens + token] = (uint8_t)(int8_t)zero;
        for (int c = first; c < end; c++) four[c] = code4(x[c], scale, zero);
    }
    for (int c = 0; c < half; c++) codes[c] = (uint8_t)(four[c] | four[half + c] << 4);
}

static void seal_v(const kv_layer *l, const rows_in *x, float tensor_scale, uint8_t *codes, uint8_t *scales) {
    const int dim = l->head_dim;
    float row[KV_MAX_DIM];
    for (int t = 0; t < l->block_size; t++) {
        widen(x, t, dim, row);
        if (l->v.kind == KV_I4) encode4_token(row, dim, l->block_size, t, codes + t * dim / 2, scales);
        else encode_token(&l->v, row, dim, t, tensor_scale, codes + kv_width(l->v.kind, t * dim), scales);
    }
}

/* Per-channel K: all rows are needed before the first code. */
static void seal_channels(const kv_layer *l, const rows_in *x, uint8_t *codes, uint8_t *scales) {
    const int dim = l->head_dim, tokens = l->block_size;
    float row[KV_MAX_TOKENS][KV_MAX_DIM], low[KV_MAX_DIM], high[KV_MAX_DIM], scale[KV_MAX_DIM], base[KV_MAX_DIM];
    for (int t = 0; t < tokens; t++) widen(x, t, dim, row[t]);
    for (int c = 0; c < dim; c += 16) {
        v16 a = v_load(row[0] + c), b = a;
        for (int t = 1; t < tokens; t++) a = v_min(a, v_load(row[t] + c)), b = v_max(b, v_load(row[t] + c));
        v_store(low + c, a);
        v_store(high + c, b);
    }
    uint8_t lane[KV_MAX_DIM];
    if (l->k.kind == KV_I8) {
        uint16_t *stored = (uint16_t *)scales;
        for (int c = 0; c < dim; c += 16) {
            for (int i = c; i < c + 16; i++) base[i] = clamp((high[i] + low[i]) * 0.5f, -65504.0f, 65504.0f);
            v_store_fp16(stored + dim + c, v_load(base + c));
            v_store(base + c, v_load_fp16(stored + dim + c));
            for (int i = c; i < c + 16; i++) scale[i] = fmaxf(high[i] - base[i], base[i] - low[i]) / 127.0f;
            fp16_up16(scale + c, stored + c);
        }
        for (int t = 0; t < tokens; t++) {
            for (int c = 0; c < dim; c++) row[t][c] = (row[t][c] - base[c]) / scale[c];
            encode(KV_I8, row[t], dim, lane);
            for (int c = 0; c < dim; c++) codes[c * tokens + t] = lane[c];
        }
        return;
    }
    for (int c = 0; c < dim; c++) {
        scales[c] = range4(low[c], high[c], scale + c, base + c);
        scales[dim + c] = (uint8_t)(int8_t)base[c];
    }
    for (int t = 0; t < tokens; t++) {
        for (int c = 0; c < dim; c++) lane[c] = code4(row[t][c], scale[c], base[c]);
        for (int c = 0; c < dim / 2; c++) codes[c * tokens + t] = (uint8_t)(lane[c] | lane[dim / 2 + c] << 4);
    }
}

static void seal_k(const kv_layer *l, const rows_in *x, float tensor_scale, uint8_t *codes, uint8_t *scales) {
    if (l->k.scaling == KV_PER_CHANNEL) {
        seal_channels(l, x, codes, scales);
        return;
    }
    const int dim = l->head_dim, tokens = l->block_size;
    float row[KV_MAX_DIM];
    uint8_t coded[KV_MAX_DIM * 4];
    for (int t = 0; t < tokens; t++) {
        encode_token(&l->k, widen(x, t, dim, row), dim, t, tensor_scale, coded, scales);
        if (l->k.kind == KV_FP32)
            for (int c = 0; c < dim; c++) memcpy(codes + 4 * (c * tokens + t), coded + 4 * c, 4);
        else if (l->k.kind <= KV_FP16)
            for (int c = 0; c < dim; c++) memcpy(codes + 2 * (c * tokens + t), coded + 2 * c, 2);
        else
            for (int c = 0; c < dim; c++) codes[c * tokens + t] = coded[c];
    }
}

static void seal_page(const kv_layer *l, uint8_t *page, int head, const rows_in *k, const rows_in *v, const float *scales) {
    seal_k(l, k, scales ? scales[0] : 1.0f, page + l->k.codes + head * l->k.head_codes,
           page + l->k.scales + head * l->k.head_scales);
    seal_v(l, v, scales ? scales[1] : 1.0f, page + l->v.codes + head * l->v.head_codes,
           page + l->v.scales + head * l->v.head_scales);
}

typedef struct {
    uint8_t *pages;
    const int32_t *ids;
    const void *k, *v;
    const float *scales; /* K and V scale of this layer, or NULL */
    int64_t count, k_stride, v_stride; /* elements from token to token; heads are head_dim apart */
    int32_t kind;
} kv_seal_call;

typedef struct {
    const kv_layer *layer;
    const kv_seal_call *call;
} seal_job;

static void seal_task(void *context, int64_t task, int32_t thread) {
    (void)thread;
    const seal_job *j = context;
    const kv_layer *l = j->layer;
    const kv_seal_call *call = j->call;
    const int64_t index = task / l->kv_heads, head = task % l->kv_heads, token = index * l->block_size;
    const int64_t k_first = token * call->k_stride + head * l->head_dim, v_first = token * call->v_stride + head * l->head_dim;
    rows_in k = {(const uint8_t *)call->k + kv_width(call->kind, k_first), call->k_stride, call->kind};
    rows_in v = {(const uint8_t *)call->v + kv_width(call->kind, v_first), call->v_stride, call->kind};
    seal_page(l, call->pages + call->ids[index] * l->page_bytes, (int)head, &k, &v, call->scales);
}

void kv_seal(const kv_layer *layer, const kv_seal_call *call) {
    seal_job j = {layer, call};
    kv_parallel(call->count * layer->kv_heads, seal_task, &j);
}

typedef struct {
    const kv_layer *layers;
    uint8_t *pages;
    const uint8_t *tails;
    const int32_t *slots, *ids;
    const float *scales; /* [layers, 2], or NULL */
    int64_t layer_count;
} tails_job;

static void tails_task(void *context, int64_t task, int32_t thread) {
    (void)thread;
    const tails_job *j = context;
    const int64_t index = task / j->layer_count, layer = task % j->layer_count;
    const kv_layer *l = j->layers + layer;
    const uint8_t *tail = j->tails + j->slots[index] * l->tail_bytes;
    for (int head = 0; head < l->kv_heads; head++) {
        int64_t at = head * kv_width(l->tail_kind, (int64_t)l->block_size * l->head_dim);
        rows_in k = {tail + l->tail_k + at, l->head_dim, l->tail_kind}, v = {tail + l->tail_v + at, l->head_dim, l->tail_kind};
        seal_page(l, j->pages + j->ids[index] * l->page_bytes, head, &k, &v, j->scales ? j->scales + 2 * layer : NULL);
    }
}

void kv_seal_tails(const kv_layer *layers, int64_t layer_count, uint8_t *pages, const uint8_t *tails, const int32_t *slots,
                   const int32_t *ids, int64_t count, const float *scales) {
    tails_job j = {layers, pages, tails, slots, ids, scales, layer_count};
    kv_parallel(count * layer_count, tails_task, &j);
}
