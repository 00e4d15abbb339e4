/* Panels with bf16 activations and vdpbf16ps, which multiplies 16 outputs × 2 inputs and adds in float. The codes of q4
 * and q8 are exact in bf16; scales are applied in float, once a group. */
#include "linear_panel.h"

#if KV_DOT_BF16

#define CHUNK KV_CHUNK_GROUPS

KV_INLINE __m512 dot(__m512 sum, __m512i weights, __m512i x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)x);
}

/* 32 int8, pairs of inputs of 16 outputs, as bf16. */
KV_INLINE __m512i bytes_bf16(const uint8_t *codes) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)codes)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)(codes + 16))));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* bf16 of 0 … 15, twice: vpermw looks at five bits of a word, of which the fifth belongs to the next nibble. */
KV_INLINE __m512i nibble_table(void) {
    static const uint16_t table[32] __attribute__((aligned(64))) = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
        0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    return _mm512_load_si512(table);
}

/* Decodes one group of one block into 16 vectors, one per pair of inputs. */
KV_INLINE void decode(const int format, const uint8_t *bytes, __m512i *w, __m512 *scale, __m512 *minimum) {
    if (format == KV_W_BF16) {
        _Pragma("GCC unroll 16") for (int p = 0; p < 16; p++) w[p] = _mm512_load_si512(bytes + p * 64);
    } else if (format == KV_W_Q8) {
        *scale = _mm512_load_ps(bytes);
        _Pragma("GCC unroll 16") for (int p = 0; p < 16; p++) w[p] = bytes_bf16(bytes + 64 + p * 32);
    } else {
        __m512i table = nibble_table();
        *scale = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)bytes));
        *minimum = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(bytes + 32)));
        _Pragma("GCC unroll 4") for (int s = 0; s < 4; s++) {
            __m512i words = _mm512_load_si512(bytes + 64 + s * 64);
            w[s * 4] = _mm512_permutexvar_epi16(words, table);
            w[s * 4 + 1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
            w[s * 4 + 2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
            w[s * 4 + 3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
        }
    }
}

/* R rows, scaled formats: weights stay in registers from decoding to use. Rows are interleaved, because each is one
 * chain of dependent additions. */
KV_INLINE void few_rows(const int R, const int format, const uint8_t *data, int64_t groups, const uint16_t *x,
                        int64_t stride, const float *sums, float *tile) {
    for (int64_t b = 0; b < groups * 2; b++, data += kv_group_bytes(format)) {
        const int32_t *pairs = (const int32_t *)(x + b / 2 * 32);
        float *t = tile + b % 2 * 16;
        __m512i w[16];
        __m512 scale, minimum = _mm512_setzero_ps(), sum[8];
        decode(format, data, w, &scale, &minimum);
        _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) sum[r] = _mm512_setzero_ps();
        _Pragma("GCC unroll 16") for (int p = 0; p < 16; p++)
            _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
                sum[r] = dot(sum[r], w[p], _mm512_set1_epi32(pairs[r * (stride / 2) + p]));
        _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {
            sum[r] = _mm512_fmadd_ps(scale, sum[r], _mm512_load_ps(t + r * 32));
            if (format == KV_W_Q4) sum[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[r * groups + b / 2]), sum[r]);
            _mm512_store_ps(t + r * 32, sum[r]);
        }
    }
}

/* R rows times a decoded chunk: weights [group][block][16 pairs], scales [group][block][scale, minimum]. */
KV_INLINE void multiply(const int R, const int format, const __m512i *weights, const __m512 *scales, int64_t groups,
                        const uint16_t *x, int64_t stride, const float *sums, int64_t sum_stride, float *tile) {
    __m512 total[6][2], sum[6][2];
    _Pragma("GCC unroll 6") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 2") for (int h = 0; h < 2; h++) total[r][h] = _mm512_load_ps(tile + r * 32 + h * 16);
    for (int64_t g = 0; g < groups; g++, weights += 32, scales += 4) {
        _Pragma("GCC unroll 6") for (int r = 0; r < R; r++)
            _Pragma("GCC unroll 2") for (int h = 0; h < 2; h++)
                sum[r][h] = format >= KV_W_Q8 ? _mm512_setzero_ps() : total[r][h];
        _Pragma("GCC unroll 4") for (int p = 0; p < 16; p++) {
            __m512i w0 = weights[p], w1 = weights[16 + p];
            _Pragma("GCC unroll 6") for (int r = 0; r < R; r++) {
                __m512i pair = _mm512_set1_epi32(((const int32_t *)(x + r * stride + g * 32))[p]);
                sum[r][0] = dot(sum[r][0], w0, pair);
                sum[r][1] = dot(sum[r][1], w1, pair);
            }
        }
        _Pragma("GCC unroll 6") for (int r = 0; r < R; r++)
            _Pragma("GCC unroll 2") for (int h = 0; h < 2; h++) {
                if (format >= KV_W_Q8) total[r][h] = _mm512_fmadd_ps(scales[h * 2], sum[r][h], total[r][h]);
                else total[r][h] = sum[r][h];
                if (format == KV_W_Q4)
                    total[r][h] = _mm512_fmadd_ps(scales[h * 2 + 1], _mm512_set1_ps(sums[r * sum_stride + g]), total[r][h]);
            }
    }
    _Pragma("GCC unroll 6") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 2") for (int h = 0; h < 2; h++) _mm512_store_ps(tile + r * 32 + h * 16, total[r][h]);
}

/* Many rows: each chunk of the panel is decoded once and used by all of them. */
KV_INLINE void many_rows(const int format, const uint8_t *data, int64_t groups, const uint16_t *x, int64_t stride,
                         const float *sums, int64_t rows, float *tile) {
    const int64_t bytes = kv_group_bytes(format);
    int64_t chunks = (groups + CHUNK - 1) / CHUNK, chunk = (groups + chunks - 1) / chunks;
    __m512i decoded[CHUNK * 32];
    __m512 scales[CHUNK * 4];
    for (int64_t g = 0; g < groups; g += chunk) {
        int64_t count = groups - g < chunk ? groups - g : chunk;
        const __m512i *weights = decoded;
        if (format == KV_W_BF16) weights = (const __m512i *)(data + g * 2 * bytes);
        else
            for (int64_t b = 0; b < count * 2; b++)
                decode(format, data + (g * 2 + b) * bytes, decoded + b * 16, scales + b * 2, scales + b * 2 + 1);
        int64_t r = 0;
#define ROWS(n)                                                                                              \
    for (; rows - r >= n; r += n)                                                                            \
        multiply(n, format, weights, scales, count, x + r * stride + g * 32, stride, sums + r * groups + g, \
                 groups, tile + r * 32);
        ROWS(6) ROWS(5) ROWS(4) ROWS(3) ROWS(2) ROWS(1)
#undef ROWS
    }
}

void kv_panel_bf16(const kv_linear *w, const kv_rows *x, int64_t panel, int64_t first, int64_t rows, float *tile) {
    int64_t groups = x->stride / KV_GROUP;
    const uint8_t *data = w->data + panel * groups * 2 * kv_group_bytes(w->format);
    const uint16_t *at = (const uint16_t *)x->x + first * x->stride;
    const float *sums = x->sums + first * groups;
    memset(tile, 0, (size_t)rows * 128);
    if (w->format == KV_W_BF16 || rows > KV_SMALL_ROWS) {
        if (w->format == KV_W_BF16) many_rows(KV_W_BF16, data, groups, at, x->stride, sums, rows, tile);
        else if (w->format == KV_W_Q8) many_rows(KV_W_Q8, data, groups, at, x->stride, sums, rows, tile);
        else many_rows(KV_W_Q4, data, groups, at, x->stride, sums, rows, tile);
        return;
    }
#define ROWS(n)                                                                                        \
    case n:                                                                                            \
        if (w->format == KV_W_Q8) few_rows(n, KV_W_Q8, data, groups, at, x->stride, sums, tile);           \
        else few_rows(n, KV_W_Q4, data, groups, at, x->stride, sums, tile);                              \
        break;
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) }
#undef ROWS
}

#endif
