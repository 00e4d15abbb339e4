/* Scores of int8 keys without widening them: dot products of bytes (AVX512 VNNI), for 16-bit activations.
 *
 * A query becomes 16-bit integers, split into a high and a low byte: x = step * (256 * high + low). The sums are exact
 * integers; the only error is the rounding of x, step / 2 = max|x| / 2^16, far below that of a bf16 activation. Values gain
 * nothing from it: their rows would have to be interleaved first.
 */
#include "attend.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#include "lanes.h"

#define PAIRED 2 /* independent sums hide the latency of the byte products */

/* Four bytes in every word. */
INLINE __m512i four(const void *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}

/* vpdpbusd multiplies unsigned by signed bytes: keys are moved up by 128, which `shift` takes back. */
INLINE void scores(const int rows, int dim, int64_t pages, const kv_segment *page, const kv_segment *ahead, const float *q,
                   float *out, int64_t stride) {
    int8_t high[KV_ROWS][KV_MAX_DIM], low[KV_ROWS][KV_MAX_DIM];
    float step[KV_ROWS];
    __m512i shift[KV_ROWS];
    for (int r = 0; r < rows; r++) {
        v16 top = v_set(0.0f), broken = v_set(0.0f); /* NaN if x has NaN or infinities, which integers would hide */
        for (int c = 0; c < dim; c += 16) {
            v16 x = v_load(q + r * KV_MAX_DIM + c);
            top = v_max(top, _mm512_abs_ps(x));
            broken = v_fma(x, v_set(0.0f), broken);
        }
        step[r] = v_top(top) / 32639.0f + v_sum(broken); /* 127 * 256 + 127 */
        const float per = step[r] > 0.0f ? 1.0f / step[r] : 0.0f;
        __m512i sum = _mm512_setzero_si512();
        for (int c = 0; c < dim; c += 16) {
            __m512i x = _mm512_cvtps_epi32(v_mul(v_load(q + r * KV_MAX_DIM + c), v_set(per)));
            sum = _mm512_add_epi32(sum, x);
            __m512i up = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
            _mm_storeu_si128((void *)(high[r] + c), _mm512_cvtepi32_epi8(up));
            _mm_storeu_si128((void *)(low[r] + c), _mm512_cvtepi32_epi8(x));
        }
        shift[r] = _mm512_set1_epi32(-128 * _mm512_reduce_add_epi32(sum));
    }
    /* four channel rows of sixteen tokens to sixteen groups of four channels */
    const __m512i order = _mm512_add_epi32(_mm512_set1_epi32(0x30201000),
                                           _mm512_mullo_epi32(_mm512_set1_epi32(0x01010101),
                                                              _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,
                                                                                13, 14, 15)));
    for (int64_t i = 0; i < pages; i++) {
        __m512i h[KV_ROWS][PAIRED], l[KV_ROWS][PAIRED];
        for (int r = 0; r < rows; r++)
            for (int u = 0; u < PAIRED; u++) h[r][u] = l[r][u] = _mm512_setzero_si512();
        PREFETCH(ahead[i].scales);
        for (int c = 0; c < dim; c += 4 * PAIRED)
            for (int u = 0; u < PAIRED; u++) {
                const int at = c + 4 * u;
                __m512i k = _mm512_permutexvar_epi8(order, _mm512_loadu_si512(page[i].codes + at * 16));
                k = _mm512_xor_si512(k, _mm512_set1_epi8((char)0x80));
                PREFETCH(ahead[i].codes + at * 16);
                for (int r = 0; r < rows; r++) {
                    h[r][u] = _mm512_dpbusd_epi32(h[r][u], k, four(high[r] + at));
                    l[r][u] = _mm512_dpbusd_epi32(l[r][u], k, four(low[r] + at));
                }
            }
        v16 scale = v_load_fp16(page[i].scales);
        for (int r = 0; r < rows; r++) {
            __m512i sum = _mm512_slli_epi32(_mm512_add_epi32(h[r][0], h[r][1]), 8);
            sum = _mm512_add_epi32(_mm512_add_epi32(sum, shift[r]), _mm512_add_epi32(l[r][0], l[r][1]));
            v_store(out + r * stride + i * 16, v_mul(_mm512_cvtepi32_ps(sum), v_mul(scale, v_set(step[r]))));
        }
    }
}

int kv_scores_int8(const kv_layer *layer, int rows, int64_t pages, const kv_segment *page, const kv_segment *ahead,
                   const float *q, float *out, int64_t stride) {
    if (layer->k.kind != KV_I8 || layer->k.scaling != KV_PER_TOKEN || layer->block_size != 16) return 0;
    const int dim = layer->head_dim;
    if (rows == 4) scores(4, dim, pages, page, ahead, q, out, stride);
    else if (rows == 3) scores(3, dim, pages, page, ahead, q, out, stride);
    else if (rows == 2) scores(2, dim, pages, page, ahead, q, out, stride);
    else scores(1, dim, pages, page, ahead, q, out, stride);
    return 1;
}

#else
int kv_scores_int8(const kv_layer *layer, int rows, int64_t pages, const kv_segment *page, const kv_segment *ahead,
                   const float *q, float *out, int64_t stride) {
    (void)layer, (void)rows, (void)pages, (void)page, (void)ahead, (void)q, (void)out, (void)stride;
    return 0;
}
#endif
