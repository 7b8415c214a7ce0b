// The mean of each sequence's rows.
#pragma once

#include <cstdint>

#include "../include/bf16.h"

namespace fastbert {

template <typename T>
struct PoolingMean {
  const T* x;                 // (tokens, width)
  const int32_t* cu_seqlens;  // (sequences + 1,)
  int64_t width;
  T* out;  // (sequences, width)
};

// Sequences [begin, end). Sums are fp32, in the order of fastbert/ops/pooling.py, whose bits these are; one without
// tokens gives zeros.
template <typename T>
void pooling_mean(const PoolingMean<T>& args, int64_t begin, int64_t end);

}  // namespace fastbert
