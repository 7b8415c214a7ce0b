// A checksum for one ISA; included by checksum.cpp through foreach_isa.h.
//
// Each 32-bit lane is a sum of its own: xor, a product with an odd number, a rotation. Each of these can be undone, so
// a word that differs leaves a difference; the rotation takes it from the upper bits, which a product does not spread.

typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));

FASTBERT_SIMD Words mixed_words(Words sum, Words x) {
  sum = (sum ^ x) * (Words{} + 0x9e3779b1u);
  return sum << 15 | sum >> 17;
}

// As many sums as hide how long a product takes.
constexpr int64_t kSums = kWidth < 16 ? 8 : 4;

FASTBERT_SIMD void add_words(Words (&sums)[kSums], const char* memory) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < kSums; ++i) {
    Words x;
    __builtin_memcpy(&x, memory + i * static_cast<int64_t>(sizeof(Words)), sizeof(Words));
    sums[i] = mixed_words(sums[i], x);
  }
}

uint64_t checksum(const char* memory, int64_t lines, int64_t bytes, int64_t stride) {
  constexpr int64_t kBytes = kSums * static_cast<int64_t>(sizeof(Words));
  const int64_t whole = bytes / kBytes * kBytes;
  Words sums[kSums] = {};
  alignas(64) char rest[kBytes] = {};  // zeros behind what is left of a line
  for (int64_t line = 0; line < lines; ++line) {
    const char* at = memory + line * stride;
    for (int64_t i = 0; i < whole; i += kBytes) add_words(sums, at + i);
    if (whole == bytes) continue;
    std::memcpy(rest, at + whole, static_cast<size_t>(bytes - whole));
    add_words(sums, rest);
  }
  Words all = sums[0];
  for (int64_t i = 1; i < kSums; ++i) all = mixed_words(all, sums[i]);
  uint64_t sum = 0;
  for (int64_t lane = 0; lane < kWidth; ++lane) sum = mixed(sum, all[lane]);
  return sum;
}
