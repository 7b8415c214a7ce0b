#include "adamw.h"

#include <algorithm>
#include <cmath>

#include "../include/isa.h"

namespace fastbert {
namespace {

constexpr int64_t kBlock = 64;     // elements that are skipped together
constexpr int64_t kSummed = 1024;  // that are added up in float32, before double takes over

// (1 - share) * old + share * x, from the nearer end: what a small x leaves of a large old one is not what two large
// numbers leave of each other. `share` is the same for all elements of a loop.
template <typename T>
FASTBERT_INLINE T moved(T old, T x, T share) {
  return share <= T(0.5) ? old + share * (x - old) : x - (T(1) - share) * (x - old);
}

// What a step makes of one element.
template <typename T>
FASTBERT_INLINE void step_element(T g, const AdamWStep<T>& step, T& weight, T& mean, T& square) {
  const T m = moved(mean, g, step.new_mean);
  const T s = moved(square, g * g, step.new_square);
  mean = m;
  square = s;
  weight = weight * step.keep - step.rate * (m / (std::sqrt(s) * step.root_scale + step.eps));
}

template <typename T>
FASTBERT_INLINE int any_mean(const T* mean, int64_t n) {
  int any = 0;
#pragma omp simd reduction(| : any)
  for (int64_t i = 0; i < n; ++i) any |= mean[i] != 0;
  return any;
}

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
    if (!any && a.mean_outlives) any = any_mean(mean, n);
    if (!any) {
      if (a.step.keep != 1) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) weight[i] *= a.step.keep;
      }
      continue;
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      step_element(gradient[i] * a.clip, a.step, weight[i], mean[i], square[i]);
    }
  }
}

// At most kBlock elements from `first` on.
template <typename T>
FASTBERT_INLINE void deferred_block(const AdamWArgs<T>& a, const AdamWStep<T>* steps, int64_t count, int64_t first,
                                    int64_t n) {
  T weight[kBlock] = {}, mean[kBlock] = {}, square[kBlock] = {};  // whole vectors, which stay in registers
  int any = 0;
#pragma omp simd reduction(| : any)
  for (int64_t i = 0; i < n; ++i) {
    weight[i] = a.weight[first + i], square[i] = a.square[first + i];
    any |= square[i] != 0;
  }
  if (!any && a.mean_outlives) any = any_mean(a.mean + first, n);
  if (!any) {
    for (int64_t t = 0; t < count; ++t) {
      const T keep = steps[t].keep;
#pragma omp simd
      for (int64_t i = 0; i < kBlock; ++i) weight[i] *= keep;
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) mean[i] = a.mean[first + i];
    for (int64_t t = 0; t < count; ++t) {
      const AdamWStep<T> step = steps[t];
#pragma omp simd
      for (int64_t i = 0; i < kBlock; ++i) step_element(T(0), step, weight[i], mean[i], square[i]);
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) a.mean[first + i] = mean[i], a.square[first + i] = square[i];
  }
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) a.weight[first + i] = weight[i];
}

template <typename T>
FASTBERT_INLINE void adamw_deferred_body(const AdamWArgs<T>& args, const AdamWStep<T>* steps, int64_t count,
                                         int64_t begin, int64_t end) {
  const AdamWArgs<T> a = args;
  int64_t first = begin;
  for (; first + kBlock <= end; first += kBlock) deferred_block(a, steps, count, first, kBlock);
  if (first < end) deferred_block(a, steps, count, first, end - first);
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
FASTBERT_DISPATCH(adamw_deferred,
                  (const AdamWArgs<T>& args, const AdamWStep<T>* steps, int64_t count, int64_t begin, int64_t end),
                  (args, steps, count, begin, end))
FASTBERT_DISPATCH(sum_of_squares, (const T* x, int64_t begin, int64_t end, double* out), (x, begin, end, out))

template void adamw(const AdamWArgs<float>&, int64_t, int64_t);
template void adamw_deferred(const AdamWArgs<float>&, const AdamWStep<float>*, int64_t, int64_t, int64_t);
template void sum_of_squares(const float*, int64_t, int64_t, double*);

}  // namespace fastbert
