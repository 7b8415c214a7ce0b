#include "pooling.h"

#include <algorithm>

#include "../include/isa.h"

namespace fastbert {
namespace {

constexpr int64_t kColumns = 256;  // whose sums stay in the first-level cache
// Tokens of the longest chain of additions. Chains end at its multiples among all tokens of the batch, not of the
// sequence: that is how torch's operations do it (ops/pooling.py).
constexpr int64_t kChain = 64;

template <typename T>
FASTBERT_INLINE void pooling_mean_body(const PoolingMean<T>& args, int64_t begin, int64_t end) {
  float sum[kColumns], part[kColumns];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = args.cu_seqlens[i], last = args.cu_seqlens[i + 1];
    const auto length = static_cast<float>(std::max<int64_t>(1, last - first));
    for (int64_t column = 0; column < args.width; column += kColumns) {
      const int64_t n = std::min(kColumns, args.width - column);
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
      T* out = args.out + i * args.width + column;
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) out[c] = from_float<T>(sum[c] / length);
    }
  }
}

}  // namespace

FASTBERT_DISPATCH(pooling_mean, (const PoolingMean<T>& args, int64_t begin, int64_t end), (args, begin, end))

template void pooling_mean(const PoolingMean<float>&, int64_t, int64_t);
template void pooling_mean(const PoolingMean<BFloat16>&, int64_t, int64_t);

}  // namespace fastbert
