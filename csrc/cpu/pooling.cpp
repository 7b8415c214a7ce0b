#include "pooling.h"

#include <algorithm>

#include "../include/isa.h"

namespace fastbert {
namespace {

constexpr int64_t kColumns = 256;  // whose sums stay in the first-level cache
// Tokens of the longest chain of additions. Chains end at its multiples among all tokens of the batch, not of the
// sequence: that is how torch's operations do it (ops/pooling.py).
constexpr int64_t kChain = 64;

// What of a sequence's tokens is read: of kCls the first.
template <typename Args>
FASTBERT_INLINE int64_t end_of(const Args& args, int64_t i) {
  const int64_t first = args.cu_seqlens[i], last = args.cu_seqlens[i + 1];
  return args.mode == Pooling::kCls ? std::min(last, first + 1) : last;
}

template <typename T>
FASTBERT_INLINE void sum_rows(const PoolingFwd<T>& args, int64_t first, int64_t last, int64_t column, int64_t n,
                              float* sum) {
  float part[kColumns];
  for (int64_t c = 0; c < n; ++c) sum[c] = 0.0f;
  for (int64_t token = first; token < last;) {
    for (int64_t c = 0; c < n; ++c) part[c] = 0.0f;
    for (const int64_t stop = std::min(last, (token / kChain + 1) * kChain); token < stop; ++token) {
      const T* row = args.x + token * args.width + column;
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) part[c] += to_float(row[c]);
    }
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) sum[c] += part[c];
  }
}

template <typename T>
FASTBERT_INLINE void largest_rows(const PoolingFwd<T>& args, int64_t first, int64_t last, int64_t column, int64_t n,
                                  float* top, int32_t* ties) {
  for (int64_t c = 0; c < n; ++c) top[c] = first < last ? -__builtin_inff() : 0.0f;
  for (int64_t c = 0; c < n; ++c) ties[c] = 0;
  for (int64_t token = first; token < last; ++token) {
    const T* row = args.x + token * args.width + column;
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      const float x = to_float(row[c]);
      ties[c] = x > top[c] ? 1 : ties[c] + (x == top[c] ? 1 : 0);
      top[c] = x > top[c] || x != x ? x : top[c];  // a NaN stays
    }
  }
}

template <typename T>
FASTBERT_INLINE void pooling_fwd_body(const PoolingFwd<T>& args, int64_t begin, int64_t end) {
  float pooled[kColumns];
  int32_t ties[kColumns];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = args.cu_seqlens[i], last = end_of(args, i);
    const auto length = static_cast<float>(std::max<int64_t>(1, last - first));
    for (int64_t column = 0; column < args.width; column += kColumns) {
      const int64_t n = std::min(kColumns, args.width - column), at = i * args.width + column;
      if (args.mode == Pooling::kMax) {
        largest_rows(args, first, last, column, n, pooled, ties);
        for (int64_t c = 0; args.ties != nullptr && c < n; ++c) args.ties[at + c] = ties[c];
      } else {
        sum_rows(args, first, last, column, n, pooled);
#pragma omp simd
        for (int64_t c = 0; c < n; ++c) pooled[c] /= length;
      }
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) args.out[at + c] = from_float<T>(pooled[c]);
    }
  }
}

template <typename T>
FASTBERT_INLINE void pooling_bwd_body(const PoolingBwd<T>& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = args.cu_seqlens[i], read = end_of(args, i), last = args.cu_seqlens[i + 1];
    const auto length = static_cast<float>(std::max<int64_t>(1, read - first));
    const T* dout = args.dout + i * args.width;
    for (int64_t token = first; token < last; ++token) {
      T* dx = args.dx + token * args.width;
      if (token >= read) {
        for (int64_t c = 0; c < args.width; ++c) dx[c] = from_float<T>(0.0f);
      } else if (args.mode == Pooling::kMax) {
        const T *x = args.x + token * args.width, *out = args.out + i * args.width;
        const int32_t* ties = args.ties + i * args.width;
#pragma omp simd
        for (int64_t c = 0; c < args.width; ++c) {
          const bool has_it = to_float(x[c]) == to_float(out[c]);
          dx[c] = from_float<T>(has_it ? to_float(dout[c]) / static_cast<float>(ties[c]) : 0.0f);
        }
      } else {
#pragma omp simd
        for (int64_t c = 0; c < args.width; ++c) dx[c] = from_float<T>(to_float(dout[c]) / length);
      }
    }
  }
}

}  // namespace

FASTBERT_DISPATCH(pooling_fwd, (const PoolingFwd<T>& args, int64_t begin, int64_t end), (args, begin, end))
FASTBERT_DISPATCH(pooling_bwd, (const PoolingBwd<T>& args, int64_t begin, int64_t end), (args, begin, end))

template void pooling_fwd(const PoolingFwd<float>&, int64_t, int64_t);
template void pooling_fwd(const PoolingFwd<BFloat16>&, int64_t, int64_t);
template void pooling_bwd(const PoolingBwd<float>&, int64_t, int64_t);
template void pooling_bwd(const PoolingBwd<BFloat16>&, int64_t, int64_t);

}  // namespace fastbert
