/* The V side: probabilities times values, whole pages and tails (V token-major in both). */
#include "attend.h"
#include "lanes.h"

/* Vectors of channels a tile keeps in registers for every row; AVX2 has registers for one. */
#ifdef __AVX512F__
#define WIDE 4
#else
#define WIDE 1
#endif

/* Channels first .. first + 16 * vectors of all pages; p already carries the scales. */
INLINE void tile(const int kind, const int rows, const int vectors, int dim, int tokens, int64_t pages,
                 const kv_segment *page, const kv_segment *ahead, int first, const float *p, int64_t stride, float *o) {
    const int width = kind == KV_FP32 ? 4 : kind <= KV_FP16 ? 2 : 1;
    v16 sum[KV_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) sum[r][j] = v_load(o + r * KV_MAX_DIM + first + 16 * j);
    for (int64_t i = 0; i < pages; i++) {
        for (int t = 0; t < tokens; t++) {
            v16 v[WIDE];
            for (int j = 0; j < vectors; j++) v[j] = KV_LOAD16(kind, page[i].codes, t * dim + first + 16 * j);
            for (int r = 0; r < rows; r++) {
                v16 weight = v_set(p[r * stride + i * tokens + t]);
                for (int j = 0; j < vectors; j++) sum[r][j] = v_fma(weight, v[j], sum[r][j]);
            }
            if (ahead)
                for (int at = 0; at < vectors * 16 * width; at += 64)
                    PREFETCH(ahead[i].codes + (t * dim + first) * width + at);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < vectors; j++) v_store(o + r * KV_MAX_DIM + first + 16 * j, sum[r][j]);
}

#ifdef __AVX512F__
/* Adds token t of bf16 page i. Even channels are the low halves of words and odd ones the high. */
INLINE void add_token(const int rows, int dim, int tokens, const kv_segment *page, const kv_segment *ahead, int first,
                      int64_t i, int t, const float *p, int64_t stride, v16 sum[KV_ROWS][WIDE]) {
    const __m512i top = _mm512_set1_epi32((int32_t)0xffff0000);
    v16 v[WIDE];
    for (int j = 0; j < WIDE; j += 2) {
        const __m512i both = _mm512_loadu_si512(page[i].codes + (t * dim + first + 16 * j) * 2);
        v[j] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
        v[j + 1] = _mm512_castsi512_ps(_mm512_and_si512(both, top));
    }
    if (ahead)
        for (int at = 0; at < WIDE * 32; at += 64) {
            PREFETCH(ahead[i].codes + (t * dim + first) * 2 + at);
            prefetch_again(page + i, 2, (t * dim + first) * 2 + at);
        }
    for (int r = 0; r < rows; r++) {
        v16 weight = v_set(p[r * stride + i * tokens + t]);
        for (int j = 0; j < WIDE; j++) sum[r][j] = v_fma(weight, v[j], sum[r][j]);
    }
}

/* The same for bf16, two vectors of channels a load, tokens of two pages by turns: two streams come faster than one. */
INLINE void tile_bf16(const int rows, int dim, int tokens, int64_t pages, const kv_segment *page, const kv_segment *ahead,
                      int first, const float *p, int64_t stride, float *o) {
    v16 sum[KV_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < WIDE; j++) sum[r][j] = v_set(0.0f);
    int64_t i = 0;
    for (; i + 2 <= pages; i += 2)
        for (int t = 0; t < tokens; t++) {
            add_token(rows, dim, tokens, page, ahead, first, i, t, p, stride, sum);
            add_token(rows, dim, tokens, page, ahead, first, i + 1, t, p, stride, sum);
        }
    for (int t = 0; i < pages && t < tokens; t++)
        add_token(rows, dim, tokens, page, ahead, first, i, t, p, stride, sum);
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < WIDE; j += 2) {
            float *to = o + r * KV_MAX_DIM + first + 16 * j;
            v_store(to, v_add(v_load(to), _mm512_permutex2var_ps(sum[r][j], low, sum[r][j + 1])));
            v_store(to + 16, v_add(v_load(to + 16), _mm512_permutex2var_ps(sum[r][j], high, sum[r][j + 1])));
        }
}
#endif

/* int4: `pairs` vectors of low-half channels from `first` and as many of the high half, each half within one group. */
INLINE void tile4(const int rows, const int pairs, int dim, int tokens, int64_t pages, const kv_segment *page,
                  const kv_segment *ahead, int first, const float *p, int64_t stride, float *o) {
    const int half = dim / 2, groups = 2 * ((half + 31) / 32), low_group = first / 32, high_group = groups / 2 + low_group;
    v16 low[KV_ROWS][2], high[KV_ROWS][2], low_zero[KV_ROWS], high_zero[KV_ROWS];
    for (int r = 0; r < rows; r++) {
        low_zero[r] = high_zero[r] = v_set(0.0f);
        for (int j = 0; j < pairs; j++) low[r][j] = high[r][j] = v_set(0.0f);
    }
    /* all weights first: a load right behind the wide store it reads from would wait for it */
    float low_p[KV_ROWS][KV_PART], high_p[KV_ROWS][KV_PART];
    for (int64_t i = 0; i < pages; i++) {
        const uint8_t *scale = page[i].scales, *zero = scale + groups * tokens;
        for (int t = 0; t < tokens; t += 16) {
            v16 ls = v_load_e5m3(scale + low_group * tokens + t), lz = v_load_i8(zero + low_group * tokens + t);
            v16 hs = v_load_e5m3(scale + high_group * tokens + t), hz = v_load_i8(zero + high_group * tokens + t);
            for (int r = 0; r < rows; r++) {
                v16 weight = v_load(p + r * stride + i * tokens + t), l = v_mul(weight, ls), h = v_mul(weight, hs);
                low_zero[r] = v_fma(l, lz, low_zero[r]);
                high_zero[r] = v_fma(h, hz, high_zero[r]);
                v_store(low_p[r] + i * tokens + t, l);
                v_store(high_p[r] + i * tokens + t, h);
            }
        }
    }
    for (int64_t i = 0; i < pages; i++)
        for (int t = 0; t < tokens; t++) {
            v16 a[2], b[2];
            for (int j = 0; j < pairs; j++) v_load_nibbles(page[i].codes + t * half + first + 16 * j, &a[j], &b[j]);
            for (int r = 0; r < rows; r++) {
                v16 l = v_set(low_p[r][i * tokens + t]), h = v_set(high_p[r][i * tokens + t]);
                for (int j = 0; j < pairs; j++) {
                    low[r][j] = v_fma(l, a[j], low[r][j]);
                    high[r][j] = v_fma(h, b[j], high[r][j]);
                }
            }
            if (t % 2 == 0) PREFETCH(ahead[i].codes + t * half + first);
        }
    for (int r = 0; r < rows; r++) {
        v16 l = v_set(v_sum(low_zero[r])), h = v_set(v_sum(high_zero[r]));
        for (int j = 0; j < pairs; j++) {
            float lanes[2][16];
            int at = first + 16 * j, valid = half - at < 16 ? half - at : 16;
            v_store(lanes[0], v_sub(low[r][j], l));
            v_store(lanes[1], v_sub(high[r][j], h));
            float *to = o + r * KV_MAX_DIM + at;
            for (int c = 0; c < valid; c++) to[c] += lanes[0][c], to[half + c] += lanes[1][c];
        }
    }
}

INLINE void values(const int kind, const int rows, int dim, int tokens, int64_t pages, const kv_segment *page,
                   const kv_segment *ahead, const float *p, int64_t stride, float *o) {
    int c = 0;
    if (kind == KV_I4) {
        for (; c + 32 <= dim / 2; c += 32) tile4(rows, 2, dim, tokens, pages, page, ahead, c, p, stride, o);
        for (; c < dim / 2; c += 16) tile4(rows, 1, dim, tokens, pages, page, ahead, c, p, stride, o);
    } else {
#ifdef __AVX512F__
        for (; kind == KV_BF16 && c + 16 * WIDE <= dim; c += 16 * WIDE)
            tile_bf16(rows, dim, tokens, pages, page, ahead, c, p, stride, o);
#endif
        for (; c + 16 * WIDE <= dim; c += 16 * WIDE)
            tile(kind, rows, WIDE, dim, tokens, pages, page, ahead, c, p, stride, o);
        for (; c < dim; c += 16) tile(kind, rows, 1, dim, tokens, pages, page, ahead, c, p, stride, o);
    }
}

typedef void (*values_fn)(int, int, int64_t, const kv_segment *, const kv_segment *, const float *, int64_t, float *);

#define VALUES(kind, rows)                                                                                            \
    static void values_##kind##_##rows(int d, int t, int64_t n, const kv_segment *g, const kv_segment *a,             \
                                       const float *p, int64_t s, float *o) {                                         \
        values(kind, rows, d, t, n, g, a, p, s, o);                                                                   \
    }
#define KIND(kind) VALUES(kind, 1) VALUES(kind, 2) VALUES(kind, 3) VALUES(kind, 4)
KIND(KV_FP32) KIND(KV_BF16) KIND(KV_FP16) KIND(KV_E4M3) KIND(KV_E5M2) KIND(KV_I8) KIND(KV_I4)
#define ENTRY(kind) [kind] = {values_##kind##_1, values_##kind##_2, values_##kind##_3, values_##kind##_4}
static const values_fn table[KV_KINDS][KV_ROWS] = {ENTRY(KV_FP32), ENTRY(KV_BF16), ENTRY(KV_FP16), ENTRY(KV_E4M3),
                                                   ENTRY(KV_E5M2), ENTRY(KV_I8),   ENTRY(KV_I4)};

void kv_values(const kv_layer *layer, int rows, int64_t pages, const kv_segment *page, const kv_segment *ahead, float *p,
               int64_t stride, float tensor_scale, int rounded, float *o) {
    const int kind = layer->v.kind, tokens = layer->block_size, scaling = layer->v.scaling;
    float unit = kv_unit(kind) * (scaling == KV_PER_TENSOR ? tensor_scale : 1.0f);
    if (scaling == KV_PER_TOKEN && kind != KV_I4) {
        for (int64_t i = 0; i < pages; i++)
            for (int t = 0; t < tokens; t += 16) {
                v16 s = v_mul(v_load_fp16((const uint16_t *)page[i].scales + t), v_set(unit));
                for (int r = 0; r < rows; r++) {
                    float *at = p + r * stride + i * tokens + t;
                    v_store(at, v_mul(v_load(at), s));
                }
            }
    } else if (unit != 1.0f) {
        for (int r = 0; r < rows; r++)
            for (int64_t t = 0; t < pages * tokens; t += 16)
                v_store(p + r * stride + t, v_mul(v_load(p + r * stride + t), v_set(unit)));
    }
    if (rounded && kv_values_bytes(layer, rows, pages, page, ahead, p, stride, o)) return;
    table[kind][rows - 1](layer->head_dim, tokens, pages, page, ahead, p, stride, o);
}

void kv_tail_values(const kv_layer *layer, int rows, int64_t tokens, const uint8_t *v, float *p, int64_t stride, float *o) {
    kv_segment segment = {v, v};
    table[layer->tail_kind][rows - 1](layer->head_dim, (int)tokens, 1, &segment, 0, p, stride, o);
}
