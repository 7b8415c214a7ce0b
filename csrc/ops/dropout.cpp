#include "dropout.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "../cpu/dropout.h"

namespace fastbert {

at::Tensor dropout_cpu(const at::Tensor& x_, const at::Tensor& philox, double dropout_p) {
  TORCH_CHECK(x_.dim() > 0, "x has no dimensions, expected (..., width)");
  const at::Tensor x = checked("x", x_, x_.sizes(), x_.scalar_type());
  const Dropout dropout = make_dropout(dropout_p, philox);
  const int64_t width = x.size(-1), rows = width == 0 ? 0 : x.numel() / width;
  const at::Tensor out = at::empty_like(x);
  for_dtype(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const DropoutArgs<T> args{data<const T>(x), dropout, width, data<T>(out)};
    at::parallel_for(0, rows, 1 + 16384 / (width + 1),
                     [&](int64_t begin, int64_t end) { dropout_rows(args, begin, end); });
  });
  return out;
}

}  // namespace fastbert
