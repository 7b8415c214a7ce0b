// One row for each sequence's rows: mean, first or maximum; and their gradients. T is the storage type, sums are fp32.
#pragma once

#include <cstdint>

#include "../include/bf16.h"

namespace fastbert {

enum class Pooling { kMean, kCls, kMax };

template <typename T>
struct PoolingFwd {
  const T* x;                 // (tokens, width)
  const int32_t* cu_seqlens;  // (sequences + 1,)
  int64_t width;
  Pooling mode;
  T* out;         // (sequences, width); of a sequence without tokens zeros
  int32_t* ties;  // as out, or null: how many tokens have the maximum
};

// Sequences [begin, end). Means are summed in the order of fastbert/ops/pooling.py, and have its bits.
template <typename T>
void pooling_fwd(const PoolingFwd<T>& args, int64_t begin, int64_t end);

template <typename T>
struct PoolingBwd {
  const T* dout;  // (sequences, width)
  const T *x, *out;
  const int32_t* ties;  // these three of kMax
  const int32_t* cu_seqlens;
  int64_t width;
  Pooling mode;
  T* dx;  // (tokens, width)
};

template <typename T>
void pooling_bwd(const PoolingBwd<T>& args, int64_t begin, int64_t end);

}  // namespace fastbert
