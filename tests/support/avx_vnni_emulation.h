// What AVX-VNNI's vpdpbusd does (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2), in AVX2.
// Stands in for it where FASTBERT_AVX_VNNI_EMULATION names this file: `make sanitize` builds it so.

// c + a * b, with four unsigned bytes of each lane of a and four signed ones of b: products of 16 bits, sums of 32.
FASTBERT_SIMD __m256i emulated_vpdpbusd(__m256i c, __m256i a, __m256i b) {
  const __m256i low = _mm256_set1_epi16(0xff);
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return _mm256_add_epi32(c, _mm256_add_epi32(even, odd));
}
