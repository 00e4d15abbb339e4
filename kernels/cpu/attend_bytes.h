/* Integer products of codes for bf16 activations (AVX512 VNNI and VBMI): shared by the K and the V side.
 *
 * Codes are never widened to floats. The other factor, a query or a weight, becomes 16-bit integers times a step, chosen per
 * row and part, so that its rounding is 2^-16 of the largest; sums of products are exact.
 */
#ifndef KV_ATTEND_BYTES_H
#define KV_ATTEND_BYTES_H

#include "attend.h"
#include "lanes.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define HAVE_BYTES 1

INLINE __m512i broadcast4(const void *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}

/* Sixteen bytes of each of four rows. */
INLINE __m512i load4(const uint8_t *p, int64_t stride) {
    if (stride == 16) return _mm512_loadu_si512(p);
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const void *)p));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const void *)(p + stride)), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const void *)(p + 2 * stride)), 2);
    return _mm512_inserti32x4(x, _mm_loadu_si128((const void *)(p + 3 * stride)), 3);
}

/* For _mm512_permutexvar_epi8: from four rows of sixteen bytes to sixteen groups of four; `rows` is which row each byte of
 * a group is from, times 16. */
INLINE __m512i grouping(int32_t rows) {
    const __m512i column = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_add_epi32(_mm512_set1_epi32(rows), _mm512_mullo_epi32(_mm512_set1_epi32(0x01010101), column));
}

#else
#define HAVE_BYTES 0
#endif
#endif
