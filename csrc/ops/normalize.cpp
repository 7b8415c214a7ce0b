#include "normalize.h"

#include <algorithm>

#include "../cpu/normalize.h"
#include "tensors.h"

namespace fastbert {

Array normalize_cpu(const Array& x_, double eps) {
  check(x_.is_cpu() && x_.dim() == 2, "x has shape ", x_.sizes(), " on ", x_.device(),
        ", expected (rows, width) on cpu");
  const Array x = contiguous(x_), out = empty(x.sizes(), ScalarType::Float);
  const int64_t width = x.size(1), grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width));
  for_dtype(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const Normalize<T> args{x.data<const T>(), width, static_cast<float>(eps), out.data<float>()};
    parallel_for(0, x.size(0), grain, [&](int64_t begin, int64_t end) { normalize(args, begin, end); });
  });
  return out;
}

}  // namespace fastbert
