/* Matrix tiles of prompt attention: scores and weighted values of a few rows against many keys.
 *
 * Two element types. fp32 runs everywhere; bf16 needs AVX512_BF16 and packs two neighbours along the summed axis into 32
 * bits, so that one instruction multiplies both. Packed K: blocks of sixteen tokens, [dim / per][16 tokens][per]; packed V:
 * [tokens / per][dim][per], with per = 1 (fp32) or 2 (bf16). Everything is accumulated in fp32.
 */
#ifndef KV_TILE_H
#define KV_TILE_H

#include "lanes.h"

#ifdef __AVX512F__
#define TILE_ROWS 6
#define TILE_WIDE 4
#else
#define TILE_ROWS 4
#define TILE_WIDE 1
#endif

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define HAVE_BF16 1
#define MULTIPLY(bf16, x, at, v, sum)                                                                                 \
    ((bf16) ? _mm512_dpbf16_ps((sum), (__m512bh)_mm512_loadu_si512((v)),                                              \
                               (__m512bh)_mm512_set1_epi32(((const int32_t *)(x))[at]))                               \
            : v_fma(v_set(((const float *)(x))[at]), v_load((const float *)(v)), (sum)))
#else
#define HAVE_BF16 0
#define MULTIPLY(bf16, x, at, v, sum) v_fma(v_set(((const float *)(x))[at]), v_load((const float *)(v)), (sum))
#endif

/* out[row][16 * j + lane] = x[row] . K: `depth` words (fp32 or bf16 pairs) a row, `wide` blocks of sixteen tokens. */
INLINE void tile_scores(const int bf16, const int rows, const int wide, int depth, const void *x, int64_t x_stride,
                        const uint8_t *k, int64_t block_bytes, float *out, int64_t out_stride) {
    (void)bf16;
    v16 sum[TILE_ROWS][TILE_WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < wide; j++) sum[r][j] = v_set(0.0f);
    for (int64_t c = 0; c < depth; c++)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < wide; j++)
                sum[r][j] = MULTIPLY(bf16, x, r * x_stride + c, k + j * block_bytes + c * 64, sum[r][j]);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < wide; j++) v_store(out + r * out_stride + 16 * j, sum[r][j]);
}

/* o[row] = o[row] * keep[row] + p[row] . V over `depth` words of p, for 16 * wide channels. The new sums are taken apart, so
 * that rounding does not grow with what is in o already. */
INLINE void tile_values(const int bf16, const int rows, const int wide, int depth, const void *p, int64_t p_stride,
                        const uint8_t *v, int64_t row_bytes, const float *keep, float *o, int64_t o_stride) {
    (void)bf16;
    v16 sum[TILE_ROWS][TILE_WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < wide; j++) sum[r][j] = v_set(0.0f);
    for (int64_t t = 0; t < depth; t++)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < wide; j++)
                sum[r][j] = MULTIPLY(bf16, p, r * p_stride + t, v + t * row_bytes + j * 64, sum[r][j]);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < wide; j++) {
            float *to = o + r * o_stride + 16 * j;
            v_store(to, v_fma(v_load(to), v_set(keep[r]), sum[r][j]));
        }
}

/* bf16 of a in the low and of b in the high half of each word. */
INLINE void store_pairs(void *to, v16 a, v16 b) {
    uint16_t low[16], high[16];
    uint32_t both[16];
    v_store_bf16(low, a);
    v_store_bf16(high, b);
    for (int i = 0; i < 16; i++) both[i] = (uint32_t)low[i] | (uint32_t)high[i] << 16;
    memcpy(to, both, sizeof both);
}

#endif
