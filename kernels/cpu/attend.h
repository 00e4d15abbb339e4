/* Attention over pages, shared types. K and V sides are independent, so that any pair of formats composes.
 *
 * A "tile" is up to KV_ROWS query rows that share a KV head: each loaded K or V vector serves all rows of the tile.
 */
#ifndef KV_ATTEND_H
#define KV_ATTEND_H

#include <stdint.h>

#define KV_ROWS 4      /* query rows of a tile */
#define KV_PART 256      /* tokens of a part: its scores fit L1 */
#define KV_PART_WIDE 512 /* the same for keys and values without scales, which are kept beside the scores */
#define KV_MAX_DIM 256 /* head_dim; also the row stride of q and of accumulators */
#define KV_MAX_TOKENS 32 /* block_size */

/* How elements are stored; the order is known to kernels/cpu/geometry.py. */
enum kv_kind { KV_FP32, KV_BF16, KV_FP16, KV_E4M3, KV_E5M2, KV_I8, KV_I4, KV_KINDS };
enum kv_scaling { KV_NONE, KV_PER_TOKEN, KV_PER_CHANNEL, KV_PER_TENSOR };

/* One side of one layer of a page. */
typedef struct {
    int32_t kind, scaling;
    int64_t codes, scales;           /* byte offsets in the page */
    int64_t head_codes, head_scales; /* bytes of one KV head */
} kv_side;

typedef struct {
    kv_side k, v;
    int64_t page_bytes, tail_bytes;
    int64_t tail_k, tail_v; /* byte offsets in the tail */
    int32_t tail_kind, block_size, kv_heads, head_dim;
} kv_layer;

/* One KV head of one side of one page. */
typedef struct {
    const uint8_t *codes, *scales;
} kv_segment;

/* Bytes of `count` elements. */
static inline int64_t kv_width(int32_t kind, int64_t count) {
    return kind == KV_FP32 ? count * 4 : kind <= KV_FP16 ? count * 2 : kind == KV_I4 ? count / 2 : count;
}

/* Byte `at` of the pages that are read one and two steps of `step` pages after `page`. They have been prefetched before,
 * but the processor seems to drop some of many that are under way: reading with little arithmetic took 10 to 18 % less
 * time so (Zen 5). */
static inline __attribute__((always_inline)) void prefetch_again(const kv_segment *page, int step, int64_t at) {
    __builtin_prefetch(page[step].codes + at);
    __builtin_prefetch(page[2 * step].codes + at);
}
#define KV_AGAIN 4 /* pages beyond the last one that have to be there for it */

/* Scores of `pages` whole pages: scores[row * stride + page * block_size + token] = q[row] . K[token].
 * q: [rows][KV_MAX_DIM], rows <= KV_ROWS. While page i is read, page i of `ahead` (segments of the same or of the other
 * side) is prefetched. tensor_scale multiplies the scores of per-tensor formats. */
void kv_scores(const kv_layer *layer, int rows, int64_t pages, const kv_segment *page, const kv_segment *ahead,
               const float *q, float tensor_scale, float *scores, int64_t stride);

/* Scores of `tokens` rows of a tail, K [token][head_dim]. */
void kv_tail_scores(const kv_layer *layer, int rows, int64_t tokens, const uint8_t *k, const float *q, float *scores,
                    int64_t stride);

/* o[row] += sum over tokens of p[row * stride + token] * V[token]; o: [rows][KV_MAX_DIM]. p is overwritten. `rounded`:
 * results are for bf16 activations, so kv_values_bytes may do it. */
void kv_values(const kv_layer *layer, int rows, int64_t pages, const kv_segment *page, const kv_segment *ahead, float *p,
               int64_t stride, float tensor_scale, int rounded, float *o);

/* The same over `tokens` rows of a tail, V [token][head_dim]. */
void kv_tail_values(const kv_layer *layer, int rows, int64_t tokens, const uint8_t *v, float *p, int64_t stride,
                    float *o);

/* kv_scores for int8 and int4 keys in integers, exact to 2^-16 of the largest product of query and scale: for bf16
 * activations. Returns 0, having done nothing, where format or CPU does not fit. */
int kv_scores_bytes(const kv_layer *layer, int rows, int64_t pages, const kv_segment *page, const kv_segment *ahead,
                    const float *q, float tensor_scale, float *scores, int64_t stride);

/* kv_scores for bf16 keys and bf16 queries q [rows][KV_MAX_DIM], times `scale`. Returns 0, having done nothing, where format
 * or CPU does not fit. */
int kv_scores_bf16(const kv_layer *layer, int rows, int64_t pages, const kv_segment *page, const kv_segment *ahead,
                   const uint16_t *q, float scale, float *scores, int64_t stride);

/* The sums of kv_values for int8 and int4 values in integers, exact to 2^-17 of the largest weight. For int8, p has been
 * multiplied with the scales. Returns 0, having done nothing, where format or CPU does not fit. */
int kv_values_bytes(const kv_layer *layer, int rows, int64_t pages, const kv_segment *page, const kv_segment *ahead,
                    const float *p, int64_t stride, float *o);

/* Sixteen elements of an 8-bit or wider kind; E4M3 comes divided by 256 (kv_unit). */
#define KV_LOAD16(kind, base, element)                                    \
    ((kind) == KV_FP32   ? v_load((const float *)(base) + (element))          \
     : (kind) == KV_BF16 ? v_load_bf16((const uint16_t *)(base) + (element))  \
     : (kind) == KV_FP16 ? v_load_fp16((const uint16_t *)(base) + (element))  \
     : (kind) == KV_E4M3 ? v_load_e4m3_256th((base) + (element))              \
     : (kind) == KV_E5M2 ? v_load_e5m2((base) + (element))                    \
                         : v_load_i8((base) + (element)))
static inline float kv_unit(int32_t kind) { return kind == KV_E4M3 ? 256.0f : 1.0f; }

#endif
