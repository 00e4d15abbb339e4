/* Scores of int8 and int4 keys: a query (times the channel's scale, where channels have scales) as 16-bit words, two
 * channels a product. */
#include "attend_bytes.h"

#if HAVE_BYTES
#define TOP 32767.0f
#define LEAST 1e-30f /* a query so small that all its scores are zero; TOP over less would be infinite */
#define WORDS (KV_MAX_DIM + 32)

/* Channels c .. c+31 of what a page stores per channel, in the order that saturating packs undo. */
typedef struct {
    v16 a, b;
} v32;

INLINE v32 in_order(v16 x, v16 y) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(4));
    return (v32){_mm512_permutex2var_ps(x, first, y), _mm512_permutex2var_ps(x, second, y)};
}

INLINE v32 load_scales(const int kind, const uint8_t *scales, int row, int dim, int c) {
    v16 x, y = v_set(0.0f);
    if (kind == KV_I8) {
        const uint16_t *from = (const uint16_t *)scales + row * dim + c;
        x = v_load_fp16(from);
        if (c + 16 < dim) y = v_load_fp16(from + 16);
    } else if (row == 0) {
        x = v_load_e5m3(scales + c);
        if (c + 16 < dim) y = v_load_e5m3(scales + c + 16);
    } else {
        x = v_load_i8(scales + dim + c);
        if (c + 16 < dim) y = v_load_i8(scales + dim + c + 16);
    }
    return in_order(x, y);
}

INLINE v32 load_query(const float *q, int dim, int c) {
    return in_order(v_load(q + c), c + 16 < dim ? v_load(q + c + 16) : v_set(0.0f));
}

/* Largest scale of each channel over all pages, as a page stores them: as unsigned integers, which have their order and put
 * NaN above all. */
INLINE void largest(const int kind, int dim, int64_t pages, const kv_segment *page, uint8_t *top) {
    const int bytes = kind == KV_I8 ? 2 * dim : dim;
    for (int at = 0; at < bytes; at += 64) {
        const __mmask64 here = bytes - at < 64 ? (1ull << (bytes - at)) - 1 : ~0ull;
        __m512i most = _mm512_setzero_si512();
        for (int64_t i = 0; i < pages; i++) {
            const __m512i s = _mm512_maskz_loadu_epi8(here, page[i].scales + at);
            most = kind == KV_I8 ? _mm512_max_epu16(most, s) : _mm512_max_epu8(most, s);
        }
        _mm512_storeu_si512(top + at, most);
    }
}

/* Sums of sixteen vectors. */
INLINE v16 sums(const float *v) {
    v16 x[16];
    for (int i = 0; i < 16; i++) x[i] = v_load(v + 16 * i);
    for (int i = 0; i < 8; i++)
        x[i] = v_add(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 4; i++)
        x[i] = v_add(_mm512_shuffle_ps(x[2 * i], x[2 * i + 1], 0x44), _mm512_shuffle_ps(x[2 * i], x[2 * i + 1], 0xee));
    for (int count = 2; count; count /= 2)
        for (int i = 0; i < count; i++)
            x[i] = v_add(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x88), _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xdd));
    return x[0];
}

INLINE __m512i dot(__m512i sum, __m512i k, const int16_t *x) { return _mm512_dpwssd_epi32(sum, k, broadcast4(x)); }

/* x . codes of sixteen tokens. */
INLINE void products(const int kind, const int rows, int dim, int tokens, const uint8_t *codes, const uint8_t *next,
                     int16_t x[KV_ROWS][WORDS], __m512i *result) {
    const __m512i order = grouping(0x30102000); /* even bytes: channels 0 and 1; odd bytes: 2 and 3 */
    const __m512i digit = _mm512_set1_epi16(15);
    __m512i even[KV_ROWS], odd[KV_ROWS];
    for (int r = 0; r < rows; r++) even[r] = odd[r] = _mm512_setzero_si512();
    const int half = dim / 2, end = kind == KV_I4 ? half : dim;
    for (int c = 0; c < end; c += 4) {
        const __m512i k = _mm512_permutexvar_epi8(order, load4(codes + c * tokens, tokens));
        PREFETCH(next + c * tokens);
        if (kind == KV_I8) {
            const __m512i a = _mm512_srai_epi16(_mm512_slli_epi16(k, 8), 8), b = _mm512_srai_epi16(k, 8);
            for (int r = 0; r < rows; r++) {
                even[r] = dot(even[r], a, x[r] + c);
                odd[r] = dot(odd[r], b, x[r] + c + 2);
            }
        } else {
            const __m512i a = _mm512_and_si512(k, digit), b = _mm512_and_si512(_mm512_srli_epi16(k, 8), digit);
            const __m512i d = _mm512_and_si512(_mm512_srli_epi16(k, 4), digit), e = _mm512_srli_epi16(k, 12);
            for (int r = 0; r < rows; r++) {
                even[r] = dot(dot(even[r], a, x[r] + c), d, x[r] + half + c);
                odd[r] = dot(dot(odd[r], b, x[r] + c + 2), e, x[r] + half + c + 2);
            }
        }
    }
    for (int r = 0; r < rows; r++) result[r] = _mm512_add_epi32(even[r], odd[r]);
}

INLINE void scores(const int kind, const int scaling, const int rows, const kv_layer *layer, int64_t pages,
                   const kv_segment *page, const kv_segment *ahead, const float *q, float tensor_scale, float *out,
                   int64_t stride) {
    const int dim = layer->head_dim, tokens = layer->block_size, by_channel = scaling == KV_PER_CHANNEL;
    int16_t words[2][KV_ROWS][WORDS];
    float steps[KV_ROWS][WORDS]; /* the query in steps, in the order of load_scales */
    float step[KV_ROWS], bias[KV_ROWS][KV_PART]; /* sixteen unsummed lanes a page */
    uint8_t top[2 * KV_MAX_DIM];
    if (by_channel) largest(kind, dim, pages, page, top);
    for (int r = 0; r < rows; r++) {
        v16 most = v_set(0.0f), bad = v_set(0.0f); /* NaN if something is not finite, which integers would hide */
        for (int c = 0; c < dim; c += 32) {
            const v32 x = load_query(q + r * KV_MAX_DIM, dim, c);
            v32 s = {v_set(1.0f), v_set(1.0f)};
            if (by_channel) s = load_scales(kind, top, 0, dim, c);
            s = (v32){v_mul(x.a, s.a), v_mul(x.b, s.b)};
            most = v_max(most, v_max(_mm512_abs_ps(s.a), _mm512_abs_ps(s.b)));
            bad = v_fma(v_add(s.a, s.b), v_set(0.0f), bad);
            v_store(steps[r] + c, x.a);
            v_store(steps[r] + c + 16, x.b);
        }
        const float size = v_top(most);
        const v16 per = v_set(size > LEAST ? TOP / size : 0.0f);
        step[r] = size / TOP + v_sum(bad);
        for (int c = 0; c < dim; c += 16) v_store(steps[r] + c, v_mul(v_load(steps[r] + c), per));
        if (dim % 32) v_store(steps[r] + dim, v_mul(v_load(steps[r] + dim), per));
    }
    for (int64_t i = 0; i < pages; i++) {
        int16_t(*x)[WORDS] = words[by_channel ? i % 2 : 0];
        for (int64_t at = 0; at < layer->k.head_scales; at += 64) PREFETCH(ahead[i].scales + at);
        v16 sum[KV_ROWS];
        for (int r = 0; r < rows; r++) sum[r] = v_set(0.0f);
        for (int c = 0; (by_channel || i == 0) && c < dim; c += 32) {
            v32 s = {v_set(1.0f), v_set(1.0f)}, m = s;
            if (by_channel) {
                s = load_scales(kind, page[i].scales, 0, dim, c);
                m = load_scales(kind, page[i].scales, 1, dim, c);
            }
            for (int r = 0; r < rows; r++) {
                const v16 y = v_load(steps[r] + c), z = v_load(steps[r] + c + 16), a = v_mul(y, s.a), b = v_mul(z, s.b);
                _mm512_storeu_si512(x[r] + c, _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b)));
                if (kind == KV_I4) sum[r] = v_fma(b, m.b, v_fma(a, m.a, sum[r]));
                else if (by_channel) sum[r] = v_fma(z, m.b, v_fma(y, m.a, sum[r]));
            }
        }
        if (by_channel)
            for (int r = 0; r < rows; r++) v_store(bias[r] + 16 * i, sum[r]);
        for (int from = 0; from < tokens; from += 16) {
            __m512i found[KV_ROWS];
            products(kind, rows, dim, tokens, page[i].codes + from, ahead[i].codes + from * 4, x, found);
            v16 unit = v_set(scaling == KV_PER_TENSOR ? tensor_scale : 1.0f);
            if (scaling == KV_PER_TOKEN) unit = v_load_fp16((const uint16_t *)page[i].scales + from);
            for (int r = 0; r < rows; r++)
                v_store(out + r * stride + i * tokens + from, v_mul(_mm512_cvtepi32_ps(found[r]), v_mul(unit, v_set(step[r]))));
        }
    }
    if (!by_channel) return;
    for (int r = 0; r < rows; r++) {
        float add[16];
        for (int64_t i = pages; i < 16; i++) v_store(bias[r] + 16 * i, v_set(0.0f));
        v_store(add, v_mul(sums(bias[r]), v_set(kind == KV_I4 ? -step[r] : step[r])));
        for (int64_t i = 0; i < pages; i++)
            for (int t = 0; t < tokens; t += 16) {
                float *to = out + r * stride + i * tokens + t;
                v_store(to, v_add(v_load(to), v_set(add[i])));
            }
    }
}

typedef void (*scores_fn)(const kv_layer *, int64_t, const kv_segment *, const kv_segment *, const float *, float, float *,
                          int64_t);

#define SCORES(kind, scaling, rows)                                                                                   \
    static void scores_##kind##_##scaling##_##rows(const kv_layer *l, int64_t n, const kv_segment *p,                 \
                                                   const kv_segment *a, const float *q, float t, float *o, int64_t s) { \
        scores(kind, scaling, rows, l, n, p, a, q, t, o, s);                                                          \
    }
#define CASE(kind, scaling) \
    SCORES(kind, scaling, 1) SCORES(kind, scaling, 2) SCORES(kind, scaling, 3) SCORES(kind, scaling, 4)
CASE(KV_I8, KV_PER_TOKEN) CASE(KV_I8, KV_PER_CHANNEL) CASE(KV_I8, KV_PER_TENSOR) CASE(KV_I4, KV_PER_CHANNEL)
#define ENTRY(kind, scaling)                                                                                 \
    {scores_##kind##_##scaling##_1, scores_##kind##_##scaling##_2, scores_##kind##_##scaling##_3, scores_##kind##_##scaling##_4}

int kv_scores_bytes(const kv_layer *layer, int rows, int64_t pages, const kv_segment *page, const kv_segment *ahead,
                    const float *q, float tensor_scale, float *out, int64_t stride) {
    static const scores_fn eight[][KV_ROWS] = {[KV_PER_TOKEN] = ENTRY(KV_I8, KV_PER_TOKEN),
                                               [KV_PER_CHANNEL] = ENTRY(KV_I8, KV_PER_CHANNEL),
                                               [KV_PER_TENSOR] = ENTRY(KV_I8, KV_PER_TENSOR)};
    static const scores_fn four[KV_ROWS] = ENTRY(KV_I4, KV_PER_CHANNEL);
    if (layer->k.kind != KV_I8 && layer->k.kind != KV_I4) return 0;
    const scores_fn *found = layer->k.kind == KV_I8 ? eight[layer->k.scaling] : four;
    found[rows - 1](layer, pages, page, ahead, q, tensor_scale, out, stride);
    return 1;
}

#else
int kv_scores_bytes(const kv_layer *layer, int rows, int64_t pages, const kv_segment *page, const kv_segment *ahead,
                    const float *q, float tensor_scale, float *out, int64_t stride) {
    (void)layer, (void)rows, (void)pages, (void)page, (void)ahead, (void)q, (void)tensor_scale, (void)out, (void)stride;
    return 0;
}
#endif
