#include "add.h"

#include "../include/isa.h"

namespace fastbert {
namespace {

template <typename T>
FASTBERT_INLINE void add_to_body(T* sum, const T* x, int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) sum[i] = from_float<T>(to_float(sum[i]) + to_float(x[i]));
}

}  // namespace

FASTBERT_DISPATCH(add_to, (T * sum, const T* x, int64_t begin, int64_t end), (sum, x, begin, end))

template void add_to(float*, const float*, int64_t, int64_t);
template void add_to(BFloat16*, const BFloat16*, int64_t, int64_t);

}  // namespace fastbert
