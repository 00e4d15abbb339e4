/* Scores of bf16 keys and bf16 queries without widening either (AVX512_BF16): one product takes two channels of a token.
 *
 * Sums are fp32. Two of each token, of every other pair of channels, in the order of channels: a row's bits depend on the
 * row alone. Subnormal products count as zero, as the instruction has it; that is below 2^-120 of any score that matters.
 */
#include "attend.h"
#include "lanes.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512BF16__)
#define CHAINS 2 /* sums of a token */

/* Where channels c and c + 1 of sixteen tokens are in two lines of thirty-two elements: from token `first` on in rows of
 * `tokens` elements. */
INLINE __m512i neighbours(int tokens, int first) {
    const __m512i token = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low = _mm512_add_epi32(token, _mm512_set1_epi32(first));
    return _mm512_add_epi32(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(tokens)), 16));
}

INLINE __m512bh pair_of(const uint16_t *q) {
    int32_t word;
    memcpy(&word, q, 4);
    return (__m512bh)_mm512_set1_epi32(word);
}

/* Sixteen tokens of each of `vectors` pages of 16, or all tokens of a page of 32. */
INLINE void dot(const int tokens, const int rows, const int vectors, int dim, const kv_segment *page,
                const kv_segment *ahead, const uint16_t *q, float scale, float *out, int64_t stride) {
    const __m512i first = neighbours(tokens, 0), second = neighbours(tokens, 16);
    __m512 sum[KV_ROWS][2][CHAINS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++)
            for (int u = 0; u < CHAINS; u++) sum[r][j][u] = _mm512_setzero_ps();
    for (int c = 0; c < dim; c += 2 * CHAINS)
        for (int u = 0; u < CHAINS; u++) {
            const int at = (c + 2 * u) * tokens * 2; /* bytes */
            __m512bh k[2];
            if (tokens == 16)
                for (int j = 0; j < vectors; j++) {
                    k[j] = (__m512bh)_mm512_permutexvar_epi16(first, _mm512_loadu_si512(page[j].codes + at));
                    PREFETCH(ahead[j].codes + at);
                    prefetch_again(page + j, vectors, at);
                }
            else {
                const __m512i a = _mm512_loadu_si512(page->codes + at), b = _mm512_loadu_si512(page->codes + at + 64);
                k[0] = (__m512bh)_mm512_permutex2var_epi16(a, first, b);
                k[1] = (__m512bh)_mm512_permutex2var_epi16(a, second, b);
                for (int line = 0; line < 128; line += 64) {
                    PREFETCH(ahead->codes + at + line);
                    prefetch_again(page, 1, at + line);
                }
            }
            for (int r = 0; r < rows; r++) {
                const __m512bh x = pair_of(q + r * KV_MAX_DIM + c + 2 * u);
                for (int j = 0; j < vectors; j++) sum[r][j][u] = _mm512_dpbf16_ps(sum[r][j][u], k[j], x);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++)
            v_store(out + r * stride + 16 * j, v_mul(v_add(sum[r][j][0], sum[r][j][1]), v_set(scale)));
}

INLINE void scores(const int tokens, const int rows, int dim, int64_t pages, const kv_segment *page,
                   const kv_segment *ahead, const uint16_t *q, float scale, float *out, int64_t stride) {
    int64_t i = 0;
    if (tokens == 16) {
        for (; i + 2 <= pages; i += 2) dot(16, rows, 2, dim, page + i, ahead + i, q, scale, out + 16 * i, stride);
        if (i < pages) dot(16, rows, 1, dim, page + i, ahead + i, q, scale, out + 16 * i, stride);
    } else
        for (; i < pages; i++) dot(32, rows, 2, dim, page + i, ahead + i, q, scale, out + 32 * i, stride);
}

int kv_scores_bf16(const kv_layer *layer, int rows, int64_t pages, const kv_segment *page, const kv_segment *ahead,
                   const uint16_t *q, float scale, float *out, int64_t stride) {
    if (layer->k.kind != KV_BF16) return 0;
    const int dim = layer->head_dim;
#define CASE(tokens, rows) \
    case tokens + rows: scores(tokens, rows, dim, pages, page, ahead, q, scale, out, stride); return 1;
    switch (layer->block_size + rows) {
        CASE(16, 1) CASE(16, 2) CASE(16, 3) CASE(16, 4)
        CASE(32, 1) CASE(32, 2) CASE(32, 3) CASE(32, 4)
    }
#undef CASE
    return 0;
}

#else
int kv_scores_bf16(const kv_layer *layer, int rows, int64_t pages, const kv_segment *page, const kv_segment *ahead,
                   const uint16_t *q, float scale, float *out, int64_t stride) {
    (void)layer, (void)rows, (void)pages, (void)page, (void)ahead, (void)q, (void)scale, (void)out, (void)stride;
    return 0;
}
#endif
