// Dropout, as kernels take it; simd_dropout.h draws the mask. Every backend that uses Philox agrees on it: word j of
// counter (row * ceil(n / 4) + i) decides column 4 i + j, the offset is the counter's high half, and a word below p
// 2^32 drops.
#pragma once

#include <cstdint>

#include "dropout_numbers.h"

namespace fastbert {

struct Dropout {
  double p;  // 0 turns it off
  uint64_t seed;
  uint64_t offset;
};

}  // namespace fastbert
