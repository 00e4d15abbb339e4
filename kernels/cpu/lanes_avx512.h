/* AVX-512 (F, BW, VL, DQ): one register. Included by lanes.h only. */
#include <immintrin.h>

typedef __m512 v16;

INLINE v16 v_set(float x) { return _mm512_set1_ps(x); }
INLINE v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, v16 x) { _mm512_storeu_ps(p, x); }
INLINE v16 v_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
INLINE v16 v_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
INLINE v16 v_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
INLINE v16 v_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE v16 v_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
INLINE v16 v_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
INLINE v16 v_round(v16 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE v16 v_scale2(v16 x, v16 n) { return _mm512_scalef_ps(x, n); }
INLINE float v_sum(v16 x) { return _mm512_reduce_add_ps(x); }
INLINE float v_top(v16 x) { return _mm512_reduce_max_ps(x); }
/* 0 where test < limit, else x. */
INLINE v16 v_zero_below(v16 x, v16 test, float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(test, v_set(limit), _CMP_NLT_UQ), x);
}

INLINE v16 v_load_bf16(const void *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
INLINE v16 v_load_fp16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE v16 v_load_i8(const void *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p))); }
INLINE v16 v_load_e5m2(const void *p) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(p)), 8));
}
/* The value divided by 256: an e4m3 pattern moved into fp16 fields, whose exponent bias is larger by 8. */
INLINE v16 v_load_e4m3_256th(const void *p) {
    __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(x, _mm256_set1_epi16((short)0xbf80)));
}
INLINE v16 v_load_e5m3(const void *p) {
    __m512i x = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(p)), 20);
    return _mm512_castsi512_ps(_mm512_add_epi32(x, _mm512_set1_epi32(103 << 23)));
}
/* Low and high nibbles of sixteen bytes as fp32. */
INLINE void v_load_nibbles(const void *p, v16 *low, v16 *high) {
    const v16 digits = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128(p));
    *low = _mm512_permutexvar_ps(x, digits); /* looks at the low four bits only */
    *high = _mm512_permutexvar_ps(_mm512_srli_epi32(x, 4), digits);
}

INLINE void v_store_bf16(void *p, v16 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __m512i nan = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
    _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(up));
}
INLINE void v_store_fp16(void *p, v16 x) {
    _mm256_storeu_si256(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
