/* Panels with float activations: fp32 compute everywhere, and every compute type where the ISA has no bf16 product. */
#include "linear_panel.h"

#if KV_PARTS == 1
#define MAX_R 6
#elif KV_PARTS == 2
#define MAX_R 2
#else
#define MAX_R 1
#endif

#define CHUNK 4 /* groups decoded at a time: 16 KiB */

typedef struct {
    const float *weights; /* [group][block][32 k][16 rows], codes where there are scales */
    const float *scales;  /* [group][block][scale, minimum][16 rows] or NULL */
    int has_minimum;
} panel_chunk;

/* Decodes one group of one block. */
static void decode(int32_t format, const uint8_t *bytes, float *weights, float *scales) {
    if (format == KV_W_BF16) {
        for (int p = 0; p < 16; p++) {
            kv_i16 pair = kv_load_int(bytes + p * 64), low = pair, high = pair;
            KV_EACH low.P_ = pair.P_ << 16, high.P_ = pair.P_ & (int32_t)0xffff0000;
            kv_store(weights + p * 32, kv_int_bits(low));
            kv_store(weights + p * 32 + 16, kv_int_bits(high));
        }
    } else if (format == KV_W_Q8) {
        memcpy(scales, bytes, 64);
        for (int p = 0; p < 16; p++) {
            const int8_t *codes = (const int8_t *)bytes + 64 + p * 32;
            for (int i = 0; i < 16; i++) {
                weights[p * 32 + i] = (float)codes[2 * i];
                weights[p * 32 + 16 + i] = (float)codes[2 * i + 1];
            }
        }
    } else if (format == KV_W_Q4) {
        kv_store(scales, kv_load_half((const uint16_t *)bytes));
        kv_store(scales + 16, kv_load_half((const uint16_t *)bytes + 16));
        for (int s = 0; s < 4; s++) {
            kv_i16 words = kv_load_int(bytes + 64 + s * 64);
            for (int k = 0; k < 8; k++) {
                kv_i16 code = words;
                KV_EACH code.P_ = (words.P_ >> (k / 2 * 4 + k % 2 * 16)) & 15;
                kv_store(weights + (s * 8 + k) * 16, kv_int_float(code));
            }
        }
    }
}

KV_INLINE void multiply(const int R, const panel_chunk *c, int64_t groups, const float *x, int64_t stride,
                        const float *sums, int64_t sum_stride, float *tile) {
    kv_f16 part[MAX_R][2];
    for (int64_t g = 0; g < groups; g++) {
        const float *w = c->weights + g * 1024;
        _Pragma("GCC unroll 6") for (int r = 0; r < R; r++)
            for (int h = 0; h < 2; h++) part[r][h] = c->scales ? kv_set(0) : kv_load(tile + r * 32 + h * 16);
        for (int k = 0; k < 32; k++) {
            kv_f16 w0 = kv_load(w + k * 16), w1 = kv_load(w + 512 + k * 16);
            _Pragma("GCC unroll 6") for (int r = 0; r < R; r++) {
                kv_f16 value = kv_set(x[r * stride + g * 32 + k]);
                part[r][0] = kv_fma(w0, value, part[r][0]);
                part[r][1] = kv_fma(w1, value, part[r][1]);
            }
        }
        const float *s = c->scales + g * 64;
        _Pragma("GCC unroll 6") for (int r = 0; r < R; r++)
            for (int h = 0; h < 2; h++) {
                kv_f16 sum = part[r][h];
                if (c->scales) {
                    sum = kv_fma(kv_load(s + h * 32), sum, kv_load(tile + r * 32 + h * 16));
                    if (c->has_minimum) sum = kv_fma(kv_load(s + h * 32 + 16), kv_set(sums[r * sum_stride + g]), sum);
                }
                kv_store(tile + r * 32 + h * 16, sum);
            }
    }
}

void kv_panel_float(const kv_linear *w, const kv_rows *x, int64_t panel, int64_t first, int64_t rows, float *tile) {
    int64_t groups = x->stride / KV_GROUP, bytes = kv_group_bytes(w->format);
    const uint8_t *data = w->data + panel * groups * 2 * bytes;
    float weights[CHUNK * 1024] __attribute__((aligned(64)));
    float scales[CHUNK * 64] __attribute__((aligned(64)));
    memset(tile, 0, (size_t)rows * 128);
    for (int64_t g = 0; g < groups; g += CHUNK) {
        int64_t count = groups - g < CHUNK ? groups - g : CHUNK;
        panel_chunk c = {weights, w->format >= KV_W_Q8 ? scales : NULL, w->format == KV_W_Q4};
        if (w->format == KV_W_F32) c.weights = (const float *)(data + g * 2 * bytes);
        else
            for (int64_t b = 0; b < count * 2; b++)
                decode(w->format, data + (g * 2 + b) * bytes, weights + b * 512, scales + b * 32);
        for (int64_t r = 0; r < rows;) {
            const float *at = (const float *)x->x + (first + r) * x->stride + g * KV_GROUP;
            const float *sums = x->sums + (first + r) * groups + g;
#define ROWS(n)                                                                       \
    if (MAX_R >= n && rows - r >= n) {                                                \
        multiply(n, &c, count, at, x->stride, sums, groups, tile + r * 32);           \
        r += n;                                                                       \
        continue;                                                                     \
    }
#if MAX_R >= 6
            ROWS(6) ROWS(4)
#endif
#if MAX_R >= 2
            ROWS(2)
#endif
            ROWS(1)
#undef ROWS
        }
    }
}
