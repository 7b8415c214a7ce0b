// The dropout mask of one row. Every backend that uses Philox agrees on it: word j of counter (row * ceil(n / 4) + i)
// decides column 4 i + j, the offset is the counter's high half, and a word below p 2^32 drops.
#pragma once

#include <cstdint>

#include "dropout_numbers.h"
#include "philox.h"

namespace fastbert {

struct Dropout {
  double p;  // 0 turns it off
  uint64_t seed;
  uint64_t offset;
};

inline int64_t padded_to_philox(int64_t n) { return (n + 3) / 4 * 4; }

// multiplier[i] is 0 where column i is dropped and 1 / (1 - p) where it is kept; it has room for padded_to_philox(n).
// `first` is the counter of columns 0 to 3.
FASTBERT_INLINE void fill_dropout_from(const Dropout& dropout, uint64_t first, int64_t n, float* multiplier) {
  const float keep = dropout_scale(dropout.p);
  const uint32_t threshold = dropout_threshold(dropout.p);
  const uint64_t seed = dropout.seed, offset = dropout.offset;
  const int64_t counters = (n + 3) / 4;
#pragma omp simd
  for (int64_t i = 0; i < counters; ++i) {
    const Philox4 random = philox4x32_10(first + static_cast<uint64_t>(i), offset, seed);
    multiplier[4 * i + 0] = random.w0 < threshold ? 0.0f : keep;
    multiplier[4 * i + 1] = random.w1 < threshold ? 0.0f : keep;
    multiplier[4 * i + 2] = random.w2 < threshold ? 0.0f : keep;
    multiplier[4 * i + 3] = random.w3 < threshold ? 0.0f : keep;
  }
}

// The same for row `row` of a matrix of n columns.
FASTBERT_INLINE void fill_dropout_multiplier(const Dropout& dropout, int64_t row, int64_t n, float* multiplier) {
  fill_dropout_from(dropout, static_cast<uint64_t>(row) * static_cast<uint64_t>((n + 3) / 4), n, multiplier);
}

}  // namespace fastbert
