/* Weighted sums of int8 and int4 values: a weight (probability times the value's scale) as a high and a low byte, four
 * tokens a product. */
#include "attend_bytes.h"

#if HAVE_BYTES
#define TOP 65535.0f

/* Weights of the tokens of a part: step * (256 * high + low). */
typedef struct {
    uint8_t high[KV_PART], low[KV_PART];
    float step;
} weights;

/* weight >= 0; count is a multiple of 16. */
INLINE void quantise(const float *weight, int64_t count, weights *to) {
    v16 most = v_set(0.0f), bad = v_set(0.0f); /* NaN if something is not finite, which integers would hide */
    for (int64_t t = 0; t < count; t += 16) {
        most = v_max(most, v_load(weight + t));
        bad = v_fma(v_load(weight + t), v_set(0.0f), bad);
    }
    const float size = v_top(most), per = size > 0.0f ? TOP / size : 0.0f;
    to->step = size / TOP + v_sum(bad);
    for (int64_t t = 0; t < count; t += 16) {
        __m512i x = _mm512_cvtps_epi32(v_mul(v_load(weight + t), v_set(per)));
        _mm_storeu_si128((void *)(to->high + t), _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 8)));
        _mm_storeu_si128((void *)(to->low + t), _mm512_cvtepi32_epi8(x));
    }
}

INLINE v16 combine(__m512i high, __m512i low) { return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low)); }

/* Channels first .. first + 16 * vectors. */
INLINE void eight(const int rows, const int vectors, int dim, int tokens, int64_t pages, const kv_segment *page,
                  const kv_segment *ahead, int first, const weights *w, float *o) {
    const __m512i order = grouping(0x30201000);
    __m512i high[KV_ROWS][2], low[KV_ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) high[r][j] = low[r][j] = _mm512_setzero_si512();
    for (int64_t i = 0; i < pages; i++)
        for (int t = 0; t < tokens; t += 4) {
            __m512i v[2];
            for (int j = 0; j < vectors; j++)
                v[j] = _mm512_permutexvar_epi8(order, load4(page[i].codes + t * dim + first + 16 * j, dim));
            for (int u = 0; u < 4; u += 2) PREFETCH(ahead[i].codes + (t + u) * dim + 2 * first);
            for (int r = 0; r < rows; r++) {
                const __m512i h = broadcast4(w[r].high + i * tokens + t), l = broadcast4(w[r].low + i * tokens + t);
                for (int j = 0; j < vectors; j++) {
                    high[r][j] = _mm512_dpbusd_epi32(high[r][j], h, v[j]);
                    low[r][j] = _mm512_dpbusd_epi32(low[r][j], l, v[j]);
                }
            }
        }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) {
            float *to = o + r * KV_MAX_DIM + first + 16 * j;
            v_store(to, v_fma(combine(high[r][j], low[r][j]), v_set(w[r].step), v_load(to)));
        }
}

/* Sum of weight * zero over all tokens, in steps. */
INLINE float zeros(int tokens, int64_t pages, const kv_segment *page, int at, const weights *w) {
    __m128i high = _mm_setzero_si128(), low = high;
    for (int64_t i = 0; i < pages; i++)
        for (int t = 0; t < tokens; t += 16) {
            __m128i z = _mm_loadu_si128((const void *)(page[i].scales + at + t));
            high = _mm_dpbusd_epi32(high, _mm_loadu_si128((const void *)(w->high + i * tokens + t)), z);
            low = _mm_dpbusd_epi32(low, _mm_loadu_si128((const void *)(w->low + i * tokens + t)), z);
        }
    __m128i x = _mm_add_epi32(_mm_slli_epi32(high, 8), low);
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return (float)_mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}

/* Bytes first .. first + 31 of a row: a group of the low half of the channels and one of the high half. */
INLINE void four(const int rows, int dim, int tokens, int64_t pages, const kv_segment *page, const kv_segment *ahead,
                 int first, const float *p, int64_t stride, float *o) {
    const int half = dim / 2, groups = 2 * ((half + 31) / 32), group[2] = {first / 32, groups / 2 + first / 32};
    const __m512i order = grouping(0x30201000), digit = _mm512_set1_epi8(15);
    weights w[KV_ROWS][2];
    float zero[KV_ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < 2; g++) {
            float weight[KV_PART];
            for (int64_t i = 0; i < pages; i++)
                for (int t = 0; t < tokens; t += 16)
                    v_store(weight + i * tokens + t, v_mul(v_load(p + r * stride + i * tokens + t),
                                                           v_load_e5m3(page[i].scales + group[g] * tokens + t)));
            quantise(weight, pages * tokens, &w[r][g]);
            zero[r][g] = zeros(tokens, pages, page, (groups + group[g]) * tokens, &w[r][g]);
        }
    for (int at = first; at < first + 32 && at < half; at += 16) {
        __m512i high[KV_ROWS][2], low[KV_ROWS][2];
        for (int r = 0; r < rows; r++)
            for (int g = 0; g < 2; g++) high[r][g] = low[r][g] = _mm512_setzero_si512();
        for (int64_t i = 0; i < pages; i++)
            for (int t = 0; t < tokens; t += 4) {
                const __m512i both = _mm512_permutexvar_epi8(order, load4(page[i].codes + t * half + at, half));
                const __m512i v[2] = {_mm512_and_si512(both, digit), _mm512_and_si512(_mm512_srli_epi16(both, 4), digit)};
                PREFETCH(ahead[i].codes + t * half + 4 * at - 3 * first);
                for (int r = 0; r < rows; r++)
                    for (int g = 0; g < 2; g++) {
                        const weights *x = &w[r][g];
                        high[r][g] = _mm512_dpbusd_epi32(high[r][g], broadcast4(x->high + i * tokens + t), v[g]);
                        low[r][g] = _mm512_dpbusd_epi32(low[r][g], broadcast4(x->low + i * tokens + t), v[g]);
                    }
            }
        const int valid = half - at < 16 ? half - at : 16;
        for (int r = 0; r < rows; r++)
            for (int g = 0; g < 2; g++) {
                float lanes[16], *to = o + r * KV_MAX_DIM + g * half + at;
                v_store(lanes, v_mul(v_sub(combine(high[r][g], low[r][g]), v_set(zero[r][g])), v_set(w[r][g].step)));
                for (int c = 0; c < valid; c++) to[c] += lanes[c];
            }
    }
}

INLINE void values(const int rows, const kv_layer *layer, int64_t pages, const kv_segment *page, const kv_segment *ahead,
                   const float *p, int64_t stride, float *o) {
    const int dim = layer->head_dim, tokens = layer->block_size;
    if (layer->v.kind == KV_I4) {
        for (int c = 0; c < dim / 2; c += 32) four(rows, dim, tokens, pages, page, ahead, c, p, stride, o);
        return;
    }
    weights w[KV_ROWS];
    for (int r = 0; r < rows; r++) quantise(p + r * stride, pages * tokens, w + r);
    int c = 0;
    for (; c + 32 <= dim; c += 32) eight(rows, 2, dim, tokens, pages, page, ahead, c, w, o);
    for (; c < dim; c += 16) eight(rows, 1, dim, tokens, pages, page, ahead, c, w, o);
}

int kv_values_bytes(const kv_layer *layer, int rows, int64_t pages, const kv_segment *page, const kv_segment *ahead,
                    const float *p, int64_t stride, float *o) {
    if (layer->v.kind != KV_I8 && layer->v.kind != KV_I4) return 0;
    if (rows == 4) values(4, layer, pages, page, ahead, p, stride, o);
    else if (rows == 3) values(3, layer, pages, page, ahead, p, stride, o);
    else if (rows == 2) values(2, layer, pages, page, ahead, p, stride, o);
    else values(1, layer, pages, page, ahead, p, stride, o);
    return 1;
}

#else
int kv_values_bytes(const kv_layer *layer, int rows, int64_t pages, const kv_segment *page, const kv_segment *ahead,
                    const float *p, int64_t stride, float *o) {
    (void)layer, (void)rows, (void)pages, (void)page, (void)ahead, (void)p, (void)stride, (void)o;
    return 0;
}
#endif
