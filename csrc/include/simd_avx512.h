// Vectors of sixteen: AVX-512, with its VNNI and BF16 dot products where the target has them. Included by
// foreach_isa.h.

using Floats = __m512;
using Ints = __m512i;
typedef uint64_t Longs __attribute__((vector_size(64)));
constexpr int64_t kWidth = 16;
constexpr int64_t kTileVectors = 4;  // of a tile's width: 6 x 4 sums, 4 operands and a broadcast fit 32 registers
#if defined(FASTBERT_VNNI)
constexpr bool kSplitsBytes = false;
#else
constexpr bool kSplitsBytes = true;  // int8 panels (gemm.h)
#endif
#if defined(FASTBERT_BF16)
constexpr bool kHasBf16 = true;
#else
constexpr bool kHasBf16 = false;
#endif

FASTBERT_SIMD Floats set1(float x) { return _mm512_set1_ps(x); }
FASTBERT_SIMD Ints set1(int32_t x) { return _mm512_set1_epi32(x); }
FASTBERT_SIMD Floats load(const float* p) { return _mm512_loadu_ps(p); }
FASTBERT_SIMD Ints load(const int32_t* p) { return _mm512_loadu_si512(p); }
FASTBERT_SIMD Floats load(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
FASTBERT_SIMD void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
FASTBERT_SIMD void store(int32_t* p, Ints x) { _mm512_storeu_si512(p, x); }
// Past the caches; p is a multiple of a vector. Other threads see it after end_of_streams.
FASTBERT_SIMD void stream(int32_t* p, Ints x) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), x); }
FASTBERT_SIMD void stream(float* p, Floats x) { _mm512_stream_ps(p, x); }
FASTBERT_SIMD void end_of_streams() { _mm_sfence(); }
// Rounded to bfloat16.
FASTBERT_SIMD __m256i round_bf16(Floats x) {
#if defined(FASTBERT_BF16)
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_set1_epi32(rounded, is_nan, 0x7fc00000), 16));
#endif
}
FASTBERT_SIMD void store(BFloat16* p, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(x)); }
FASTBERT_SIMD Floats rounded_to_bf16(Floats x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(round_bf16(x)), 16));
}
// Two bfloat16 a lane, `low` in the low half.
FASTBERT_SIMD Ints pair_bf16(Floats low, Floats high) {
#if defined(FASTBERT_BF16)
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, halves);
#else
  const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(round_bf16(high)), 16);
  return _mm512_or_si512(_mm512_cvtepu16_epi32(round_bf16(low)), upper);
#endif
}
FASTBERT_SIMD Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
FASTBERT_SIMD Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
FASTBERT_SIMD Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
FASTBERT_SIMD Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
FASTBERT_SIMD Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
FASTBERT_SIMD Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
FASTBERT_SIMD Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
FASTBERT_SIMD Ints mul(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
FASTBERT_SIMD Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
FASTBERT_SIMD Ints max(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
FASTBERT_SIMD Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
FASTBERT_SIMD Floats abs(Floats a) { return _mm512_abs_ps(a); }
FASTBERT_SIMD Floats step_up_to_zero(Floats x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LE_OQ), _mm512_set1_ps(1.0f));
}
FASTBERT_SIMD Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
FASTBERT_SIMD Floats round(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FASTBERT_SIMD Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }
// As in simd_generic.h, by a mask instead of a bound: no denormal result, which may take hundreds of cycles.
FASTBERT_SIMD Floats power_that_scales(Floats x) { return x; }
FASTBERT_SIMD Floats scale_by_power(Floats x, Floats n) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, _mm512_set1_ps(-127.0f), _CMP_NLE_UQ), x, n);
}
FASTBERT_SIMD float sum(Floats x) { return _mm512_reduce_add_ps(x); }
FASTBERT_SIMD int32_t largest(Ints x) { return _mm512_reduce_max_epi32(x); }
FASTBERT_SIMD void store_bytes(uint8_t* p, Ints x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
#if defined(FASTBERT_VNNI)
// c + a * b with four unsigned bytes of `a` and four signed ones of each lane of b. By hand, because gcc 12 copies the
// sums around its own intrinsic and takes 2.5 times as long.
FASTBERT_SIMD Ints dot_bytes(Ints c, const void* a, Ints b) {
  int32_t four;
  __builtin_memcpy(&four, a, 4);
  __asm__("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(set1(four)), "v"(b));
  return c;
}
#else
// As in simd_avx2.h.
FASTBERT_SIMD Ints dot_of_pairs(Ints c, Ints a, Ints b) {
  return _mm512_add_epi32(c, _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1)));
}
FASTBERT_SIMD Ints dot_bytes(Ints c, const void* a, const void* b) {
  int32_t four;
  __builtin_memcpy(&four, a, 4);
  Ints sum;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
          : "+v"(c), "=&v"(sum)
          : "v"(set1(four)), "m"(*static_cast<const __m512i_u*>(b)), "v"(_mm512_set1_epi16(1)));
  return c;
}
#endif
// a0 b0 a1 b1 ..., of the low and of the high halves.
FASTBERT_SIMD Ints interleave_low(Ints a, Ints b) {
  const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return _mm512_permutex2var_epi32(a, order, b);
}
FASTBERT_SIMD Ints interleave_high(Ints a, Ints b) {
  const __m512i order = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return _mm512_permutex2var_epi32(a, order, b);
}
// As in simd_generic.h.
FASTBERT_SIMD Longs multiply_lower(Longs a, Longs b) { return (Longs)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
FASTBERT_SIMD Ints even_longs(Longs a, Longs b) { return _mm512_unpacklo_epi64((__m512i)a, (__m512i)b); }
FASTBERT_SIMD Ints odd_longs(Longs a, Longs b) { return _mm512_unpackhi_epi64((__m512i)a, (__m512i)b); }
FASTBERT_SIMD Floats where_at_least(Ints words, uint32_t threshold, float x) {
  const __mmask16 is_kept = _mm512_cmpge_epu32_mask(words, _mm512_set1_epi32(static_cast<int32_t>(threshold)));
  return _mm512_maskz_mov_ps(is_kept, _mm512_set1_ps(x));
}
// block[i][j] becomes block[j][i]: by dwords, by pairs of them, by quarters.
FASTBERT_SIMD void transpose(Ints (&block)[16]) {
  Ints t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(block[i], block[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(block[i], block[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    block[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    block[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    block[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    block[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // quarter q of block[4 g + i] is column 4 q + i of rows 4 g to 4 g + 3
    const Ints even_low = _mm512_shuffle_i32x4(block[i], block[i + 4], 0x88);
    const Ints even_high = _mm512_shuffle_i32x4(block[i + 8], block[i + 12], 0x88);
    const Ints odd_low = _mm512_shuffle_i32x4(block[i], block[i + 4], 0xdd);
    const Ints odd_high = _mm512_shuffle_i32x4(block[i + 8], block[i + 12], 0xdd);
    block[i] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    block[i + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    block[i + 8] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    block[i + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
}
#if defined(FASTBERT_BF16)
// c + a * b with two bfloat16 of `a` and two of each lane of b.
FASTBERT_SIMD Floats dot_bf16(Floats c, const void* a, Ints b) {
  int32_t two;
  __builtin_memcpy(&two, a, 4);
  return _mm512_dpbf16_ps(c, (__m512bh)_mm512_set1_epi32(two), (__m512bh)b);
}
// As pair_bf16, of what is bfloat16 already.
FASTBERT_SIMD Ints pair_bf16(const BFloat16* even, const BFloat16* odd) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
#endif
