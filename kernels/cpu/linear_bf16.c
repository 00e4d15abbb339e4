/* Panels with bf16 activations and vdpbf16ps, which multiplies 16 outputs × 2 inputs and adds in float. The codes of q4
 * and q8 are exact in bf16; scales are applied in float, once a group. */
#include "linear_panel.h"

#include <stddef.h>

#if KV_DOT_BF16

#define CHUNK KV_CHUNK_GROUPS

#define AHEAD 8192 /* bytes; weights stream from memory at 1.4 times the speed of the hardware's prefetch alone */

KV_INLINE void prefetch(const void *now, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch((const char *)now + AHEAD + at, _MM_HINT_T0);
}

/* Keeps a running sum in its register: GCC's allocator otherwise moves sums to the stack and back at every step. */
#define KEEP(sum) __asm__("" : "+v"(sum))

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

/* Decodes quarter s of a group, 8 inputs, into 4 vectors, one per pair of inputs. */
KV_INLINE void decode_quarter(const int format, const uint8_t *bytes, int s, __m512i *w) {
    if (format == KV_W_Q8) {
        _Pragma("GCC unroll 4") for (int p = 0; p < 4; p++) w[p] = bytes_bf16(bytes + 64 + (s * 4 + p) * 32);
    } else {
        __m512i table = nibble_table(), words = _mm512_load_si512(bytes + 64 + s * 64);
        w[0] = _mm512_permutexvar_epi16(words, table);
        w[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
        w[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
        w[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
    }
}

KV_INLINE __m512 scale_of(const int format, const uint8_t *bytes) {
    return format == KV_W_Q8 ? _mm512_load_ps(bytes) : _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)bytes));
}
KV_INLINE __m512 minimum_of(const uint8_t *bytes) {
    return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(bytes + 32)));
}

/* Two inputs of one row in all lanes. Addresses are one of three bases plus a multiple of the step from row to row: a
 * pointer for each of eight rows is more than there are registers. */
KV_INLINE void find_rows(const int R, const uint16_t *x, int64_t stride, const char **base) {
    for (int i = 0; 3 * i < R; i++) base[i] = (const char *)(x + 3 * i * stride);
}
KV_INLINE __m512i pair_of(const char *const *base, int64_t stride, int row, int pair) {
    int32_t both;
    memcpy(&both, base[row / 3] + row % 3 * (stride * 2) + pair * 4, 4);
    return _mm512_set1_epi32(both);
}

/* R rows, scaled formats: weights stay in registers from decoding to use. */
KV_INLINE void few_rows(const int R, const int format, const uint8_t *data, int64_t groups, const uint16_t *x,
                        int64_t stride, const float *sums, float *tile) {
    const int64_t bytes = kv_group_bytes(format);
    for (int64_t g = 0; g < groups; g++, data += 2 * bytes) {
        const char *base[3];
        find_rows(R, x + g * KV_GROUP, stride, base);
        prefetch(data, 2 * bytes);
        __m512 sum[8][2];
        _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
        _Pragma("GCC unroll 4") for (int s = 0; s < 4; s++) {
            __m512i w0[4], w1[4];
            decode_quarter(format, data, s, w0);
            decode_quarter(format, data + bytes, s, w1);
            _Pragma("GCC unroll 4") for (int p = 0; p < 4; p++)
                _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {
                    __m512i pair = pair_of(base, stride, r, s * 4 + p);
                    sum[r][0] = dot(sum[r][0], w0[p], pair);
                    sum[r][1] = dot(sum[r][1], w1[p], pair);
                    KEEP(sum[r][0]);
                    KEEP(sum[r][1]);
                }
        }
        _Pragma("GCC unroll 2") for (int h = 0; h < 2; h++) {
            __m512 scale = scale_of(format, data + h * bytes);
            __m512 minimum = format == KV_W_Q4 ? minimum_of(data + h * bytes) : _mm512_setzero_ps();
            _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {
                float *t = tile + r * 32 + h * 16;
                __m512 total = _mm512_fmadd_ps(scale, sum[r][h], _mm512_load_ps(t));
                if (format == KV_W_Q4) total = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[r * groups + g]), total);
                _mm512_store_ps(t, total);
            }
        }
    }
}

/* R rows times a decoded chunk: weights [group][block][16 pairs], scales [group][block][scale, minimum]. `streams`: this
 * is the first use of weights that lie in memory as they are used; what follows them is prefetched. */
KV_INLINE void multiply(const int R, const int format, const int streams, const __m512i *weights, const __m512 *scales,
                        int64_t groups, const uint16_t *x, int64_t stride, const float *sums, int64_t sum_stride,
                        float *tile) {
    const int scaled = format >= KV_W_Q8;
    __m512 sum[8][2];
    _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 2") for (int h = 0; h < 2; h++) sum[r][h] = _mm512_load_ps(tile + r * 32 + h * 16);
    for (int64_t g = 0; g < groups; g++, weights += 32, scales += 4) {
        const char *base[3];
        find_rows(R, x + g * KV_GROUP, stride, base);
        if (streams) prefetch(weights, 2048);
        if (scaled)
            _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
        _Pragma("GCC unroll 16") for (int p = 0; p < 16; p++) {
            __m512i w0 = weights[p], w1 = weights[16 + p];
            _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {
                __m512i pair = pair_of(base, stride, r, p);
                sum[r][0] = dot(sum[r][0], w0, pair);
                sum[r][1] = dot(sum[r][1], w1, pair);
                KEEP(sum[r][0]);
                KEEP(sum[r][1]);
            }
        }
        if (!scaled) continue;
        _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {
            __m512 x_sum = _mm512_set1_ps(sums[r * sum_stride + g]);
            _Pragma("GCC unroll 2") for (int h = 0; h < 2; h++) {
                float *t = tile + r * 32 + h * 16;
                __m512 total = _mm512_fmadd_ps(scales[h * 2], sum[r][h], _mm512_load_ps(t));
                if (format == KV_W_Q4) total = _mm512_fmadd_ps(scales[h * 2 + 1], x_sum, total);
                _mm512_store_ps(t, total);
            }
        }
    }
    if (scaled) return;
    _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
        _Pragma("GCC unroll 2") for (int h = 0; h < 2; h++) _mm512_store_ps(tile + r * 32 + h * 16, sum[r][h]);
}

/* A function each, so that each has registers of its own. */
typedef void (*few_fn)(const uint8_t *data, int64_t groups, const uint16_t *x, int64_t stride, const float *sums,
                       float *tile);
typedef void (*multiply_fn)(const __m512i *weights, const __m512 *scales, int64_t groups, const uint16_t *x,
                            int64_t stride, const float *sums, int64_t sum_stride, float *tile);
#define FEW(n, f)                                                                                             \
    static __attribute__((noinline)) void few_##f##_##n(const uint8_t *data, int64_t groups, const uint16_t *x, \
                                                        int64_t stride, const float *sums, float *tile) {     \
        few_rows(n, f, data, groups, x, stride, sums, tile);                                                  \
    }
#define MULTIPLY(n, f, name, streams)                                                                            \
    static __attribute__((noinline)) void name(const __m512i *weights, const __m512 *scales, int64_t groups,     \
                                               const uint16_t *x, int64_t stride, const float *sums,             \
                                               int64_t sum_stride, float *tile) {                                \
        multiply(n, f, streams, weights, scales, groups, x, stride, sums, sum_stride, tile);                     \
    }
#define EIGHT(define, f) \
    define(1, f) define(2, f) define(3, f) define(4, f) define(5, f) define(6, f) define(7, f) define(8, f)
#define STREAM_BF16(n, f) MULTIPLY(n, f, stream_bf16_##n, 1)
EIGHT(FEW, KV_W_Q8)
EIGHT(FEW, KV_W_Q4)
EIGHT(STREAM_BF16, KV_W_BF16)
MULTIPLY(8, KV_W_Q8, multiply_q8, 0)
MULTIPLY(8, KV_W_Q4, multiply_q4, 0)
MULTIPLY(8, KV_W_BF16, multiply_bf16, 0)
#define NAMES(name) {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7, name##_8}
static const few_fn FEW_Q8[8] = NAMES(few_KV_W_Q8), FEW_Q4[8] = NAMES(few_KV_W_Q4);
static const multiply_fn STREAM[8] = NAMES(stream_bf16);

/* Decodes one group of one block into 16 vectors, its scales and minima. */
KV_INLINE void decode(const int format, const uint8_t *bytes, __m512i *w, __m512 *scales) {
    for (int s = 0; s < 4; s++) decode_quarter(format, bytes, s, w + s * 4);
    scales[0] = scale_of(format, bytes);
    if (format == KV_W_Q4) scales[1] = minimum_of(bytes);
}

/* Many rows, a multiple of 8: each chunk of the panel is decoded once and used by all of them. */
KV_INLINE void many_rows(const int format, multiply_fn multiply8, const uint8_t *data, int64_t groups, const uint16_t *x,
                         int64_t stride, const float *sums, int64_t rows, float *tile) {
    const int64_t bytes = kv_group_bytes(format);
    int64_t chunks = (groups + CHUNK - 1) / CHUNK, chunk = (groups + chunks - 1) / chunks;
    __m512i decoded[CHUNK * 32];
    __m512 scales[CHUNK * 4];
    for (int64_t g = 0; g < groups; g += chunk) {
        int64_t count = groups - g < chunk ? groups - g : chunk;
        const uint8_t *chunk_data = data + g * 2 * bytes;
        const __m512i *weights = format == KV_W_BF16 ? (const __m512i *)chunk_data : decoded;
        if (format != KV_W_BF16)
            for (int64_t b = 0; b < count * 2; b++) {
                prefetch(chunk_data + b * bytes, bytes);
                decode(format, chunk_data + b * bytes, decoded + b * 16, scales + b * 2);
            }
        for (int64_t r = 0; r < rows; r += 8) {
            const multiply_fn times = format == KV_W_BF16 && r == 0 ? STREAM[7] : multiply8;
            const uint16_t *from = x + r * stride + g * 32;
            times(weights, scales, count, from, stride, sums + r * groups + g, groups, tile + r * 32);
        }
    }
}

void kv_panel_bf16(const kv_linear *w, const kv_rows *x, int64_t panel, int64_t first, int64_t rows, float *tile) {
    int64_t groups = x->stride / KV_GROUP, stride = x->stride;
    const uint8_t *data = w->data + panel * groups * 2 * kv_group_bytes(w->format);
    const uint16_t *at = (const uint16_t *)x->x + first * stride;
    const float *sums = x->sums + first * groups;
    memset(tile, 0, (size_t)rows * 128);
    int64_t r = 0;
    if (rows > KV_SMALL_ROWS) {
        r = rows / 8 * 8;
        if (w->format == KV_W_BF16) many_rows(KV_W_BF16, multiply_bf16, data, groups, at, stride, sums, r, tile);
        else if (w->format == KV_W_Q8) many_rows(KV_W_Q8, multiply_q8, data, groups, at, stride, sums, r, tile);
        else many_rows(KV_W_Q4, multiply_q4, data, groups, at, stride, sums, r, tile);
    }
    for (; r < rows; r += 8) {
        int64_t some = (rows - r < 8 ? rows - r : 8) - 1;
        const uint16_t *from = at + r * stride;
        const float *sum = sums + r * groups;
        float *to = tile + r * 32;
        if (w->format == KV_W_Q4) FEW_Q4[some](data, groups, from, stride, sum, to);
        else if (w->format == KV_W_Q8) FEW_Q8[some](data, groups, from, stride, sum, to);
        else STREAM[some]((const __m512i *)data, NULL, groups, from, stride, sum, groups, to);
    }
}

#endif
