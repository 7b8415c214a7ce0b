#include "normalize.h"

#include <cmath>

#include "../include/isa.h"

namespace fastbert {
namespace {

constexpr int64_t kLanes = 16;  // sums beside each other, so that none waits for the one before

template <typename T>
FASTBERT_INLINE double square(T x) {
  const double value = to_float(x);
  return value * value;
}

template <typename T>
FASTBERT_INLINE void normalize_body(const Normalize<T>& args, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* const x = args.x + r * args.width;
    float* const out = args.out + r * args.width;
    double sum[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= args.width; i += kLanes) {
#pragma omp simd
      for (int64_t lane = 0; lane < kLanes; ++lane) sum[lane] += square(x[i + lane]);
    }
    for (int64_t lane = 0; i < args.width; ++i, ++lane) sum[lane] += square(x[i]);
    double total = 0.0;
    for (int64_t lane = 0; lane < kLanes; ++lane) total += sum[lane];
    const auto norm = static_cast<float>(std::sqrt(total));
    const float divisor = norm < args.eps ? args.eps : norm;  // a NaN stays one
#pragma omp simd
    for (int64_t c = 0; c < args.width; ++c) out[c] = to_float(x[c]) / divisor;
  }
}

}  // namespace

FASTBERT_DISPATCH(normalize, (const Normalize<T>& args, int64_t begin, int64_t end), (args, begin, end))

template void normalize(const Normalize<float>&, int64_t, int64_t);
template void normalize(const Normalize<BFloat16>&, int64_t, int64_t);

}  // namespace fastbert
