#include "adamw.h"

#include <algorithm>
#include <cmath>

#include "../include/isa.h"

namespace fastbert {
namespace {

constexpr int64_t kBlock = 64;     // elements that are skipped together
constexpr int64_t kSummed = 1024;  // that are added up in float32, before double takes over

template <typename T>
FASTBERT_INLINE void adamw_body(const AdamWArgs<T>& args, int64_t begin, int64_t end) {
  const AdamWArgs<T> a = args;  // no pointer can point at a copy
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t n = std::min(kBlock, end - first);
    T* weight = a.weight + first;
    const T* gradient = a.gradient + first;
    T* mean = a.mean + first;
    T* square = a.square + first;
    int any = 0;
#pragma omp simd reduction(| : any)
    for (int64_t i = 0; i < n; ++i) any |= (gradient[i] != 0) | (square[i] != 0);
    if (!any) {
      if (a.keep != 1) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) weight[i] *= a.keep;
      }
      continue;
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const T g = gradient[i] * a.clip;
      const T m = mean[i] + a.new_mean * (g - mean[i]);
      const T s = square[i] + a.new_square * (g * g - square[i]);
      mean[i] = m;
      square[i] = s;
      weight[i] = weight[i] * a.keep - a.rate * (m / (std::sqrt(s) * a.root_scale + a.eps));
    }
  }
}

template <typename T>
FASTBERT_INLINE void sum_of_squares_body(const T* x, int64_t begin, int64_t end, double* out) {
  double total = 0;
  for (int64_t first = begin; first < end; first += kSummed) {
    const int64_t last = std::min(end, first + kSummed);
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = first; i < last; ++i) sum += x[i] * x[i];
    total += static_cast<double>(sum);
  }
  *out = total;
}

}  // namespace

FASTBERT_DISPATCH(adamw, (const AdamWArgs<T>& args, int64_t begin, int64_t end), (args, begin, end))
FASTBERT_DISPATCH(sum_of_squares, (const T* x, int64_t begin, int64_t end, double* out), (x, begin, end, out))

template void adamw(const AdamWArgs<float>&, int64_t, int64_t);
template void sum_of_squares(const float*, int64_t, int64_t, double*);

}  // namespace fastbert
