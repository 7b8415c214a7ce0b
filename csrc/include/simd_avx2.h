// Vectors of eight: AVX2 with FMA, and AVX-VNNI's dot products of bytes where the target has them. Included by
// foreach_isa.h.

using Floats = __m256;
using Ints = __m256i;
typedef uint64_t Longs __attribute__((vector_size(32)));
constexpr int64_t kWidth = 8;
constexpr int64_t kTileVectors = 2;  // of a tile's width: 6 x 2 sums, 2 operands and a broadcast fit 16 registers
constexpr bool kHasBf16 = false;
#if defined(FASTBERT_AVX_VNNI)
constexpr bool kSplitsBytes = false;
#else
constexpr bool kSplitsBytes = true;  // int8 panels (gemm.h)
#endif

FASTBERT_SIMD Floats set1(float x) { return _mm256_set1_ps(x); }
FASTBERT_SIMD Ints set1(int32_t x) { return _mm256_set1_epi32(x); }
FASTBERT_SIMD Floats load(const float* p) { return _mm256_loadu_ps(p); }
FASTBERT_SIMD Ints load(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
FASTBERT_SIMD Floats load(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
FASTBERT_SIMD void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
FASTBERT_SIMD void store(int32_t* p, Ints x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
// Past the caches; p is a multiple of a vector. Other threads see it after end_of_streams.
FASTBERT_SIMD void stream(int32_t* p, Ints x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), x); }
FASTBERT_SIMD void stream(float* p, Floats x) { _mm256_stream_ps(p, x); }
FASTBERT_SIMD void end_of_streams() { _mm_sfence(); }
// Rounded to bfloat16 in the upper half of each lane; the lower half is rubbish.
FASTBERT_SIMD __m256i round_bf16(Floats x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan);
}
FASTBERT_SIMD void store(BFloat16* p, Floats x) {
  const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(round_bf16(x), 16), _mm256_setzero_si256());
  const __m256i ordered = _mm256_permute4x64_epi64(packed, 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(ordered));
}
FASTBERT_SIMD Floats rounded_to_bf16(Floats x) {
  return _mm256_castsi256_ps(_mm256_and_si256(round_bf16(x), _mm256_set1_epi32(static_cast<int32_t>(0xffff0000))));
}
// Two bfloat16 a lane, `low` in the low half.
FASTBERT_SIMD Ints pair_bf16(Floats low, Floats high) {
  return _mm256_blend_epi16(_mm256_srli_epi32(round_bf16(low), 16), round_bf16(high), 0xaa);
}
FASTBERT_SIMD Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
FASTBERT_SIMD Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
FASTBERT_SIMD Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
FASTBERT_SIMD Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
FASTBERT_SIMD Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
FASTBERT_SIMD Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
FASTBERT_SIMD Ints sub(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
FASTBERT_SIMD Ints mul(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
FASTBERT_SIMD Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
FASTBERT_SIMD Ints max(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
FASTBERT_SIMD Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
FASTBERT_SIMD Floats abs(Floats a) { return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff))); }
FASTBERT_SIMD Floats step_up_to_zero(Floats x) {
  return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LE_OQ), _mm256_set1_ps(1.0f));
}
FASTBERT_SIMD Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
FASTBERT_SIMD Floats round(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FASTBERT_SIMD Ints to_ints(Floats x) { return _mm256_cvtps_epi32(x); }
FASTBERT_SIMD Floats power_that_scales(Floats x) { return max(set1(-127.0f), x); }
FASTBERT_SIMD Floats scale_by_power(Floats x, Floats n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
FASTBERT_SIMD float sum(Floats x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
FASTBERT_SIMD int32_t largest(Ints x) {
  __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
FASTBERT_SIMD void store_bytes(uint8_t* p, Ints x) {
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
#if defined(FASTBERT_AVX_VNNI)
#if defined(FASTBERT_AVX_VNNI_EMULATION)
#include FASTBERT_AVX_VNNI_EMULATION
#endif
// c + a * b with four unsigned bytes of `a` and four signed ones of each lane of b. By hand, as in simd_avx512.h; VEX
// is AVX-VNNI's encoding.
FASTBERT_SIMD Ints dot_bytes(Ints c, const void* a, Ints b) {
  int32_t four;
  __builtin_memcpy(&four, a, 4);
  const Ints x = set1(four);
#if defined(FASTBERT_AVX_VNNI_EMULATION)
  return emulated_vpdpbusd(c, x, b);
#else
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(c) : "x"(x), "x"(b));
  return c;
#endif
}
#else
// c + a * b with four unsigned bytes of each lane of a, and four signed ones of b. Products of two are added in 16
// bits: no two weights of one sign may be larger than 128 together (gemm.h).
FASTBERT_SIMD Ints dot_of_pairs(Ints c, Ints a, Ints b) {
  return _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
}
// The same with four bytes of `a` in every lane, and b in memory. By hand: gcc 12 moves a tile's multiplications
// together, for which there are no registers.
FASTBERT_SIMD Ints dot_bytes(Ints c, const void* a, const void* b) {
  int32_t four;
  __builtin_memcpy(&four, a, 4);
  Ints sum;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
          : "+x"(c), "=&x"(sum)
          : "x"(set1(four)), "m"(*static_cast<const __m256i_u*>(b)), "x"(_mm256_set1_epi16(1)));
  return c;
}
#endif
// a0 b0 a1 b1 ..., of the low and of the high halves.
FASTBERT_SIMD Ints interleave_low(Ints a, Ints b) {
  return _mm256_permute2x128_si256(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b), 0x20);
}
FASTBERT_SIMD Ints interleave_high(Ints a, Ints b) {
  return _mm256_permute2x128_si256(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b), 0x31);
}
// As in simd_generic.h.
FASTBERT_SIMD Longs multiply_lower(Longs a, Longs b) { return (Longs)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
FASTBERT_SIMD Ints even_longs(Longs a, Longs b) { return _mm256_unpacklo_epi64((__m256i)a, (__m256i)b); }
FASTBERT_SIMD Ints odd_longs(Longs a, Longs b) { return _mm256_unpackhi_epi64((__m256i)a, (__m256i)b); }
FASTBERT_SIMD Floats where_at_least(Ints words, uint32_t threshold, float x) {
  const __m256i bound = _mm256_set1_epi32(static_cast<int32_t>(threshold));
  const __m256i is_kept = _mm256_cmpeq_epi32(_mm256_max_epu32(words, bound), words);
  return _mm256_and_ps(_mm256_castsi256_ps(is_kept), _mm256_set1_ps(x));
}
// block[i][j] becomes block[j][i]: by dwords, by pairs of them, by halves.
FASTBERT_SIMD void transpose(Ints (&block)[8]) {
  Ints t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(block[i], block[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(block[i], block[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    block[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    block[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    block[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    block[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2x128_si256(block[i], block[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(block[i], block[i + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) block[i] = t[i];
}
