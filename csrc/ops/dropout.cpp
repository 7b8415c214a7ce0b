#include "dropout.h"

#include <algorithm>

#include "../cpu/dropout.h"

namespace fastbert {

Array dropout_cpu(const Array& x_, const Array& philox, double dropout_p) {
  check(x_.dim() == 2, "x has shape ", x_.sizes(), ", expected (rows, width)");
  const Array x = checked("x", x_, x_.sizes(), x_.scalar_type());
  const Dropout dropout = make_dropout(dropout_p, philox);
  const int64_t rows = x.size(0), width = x.size(1);
  const Array out = empty_like(x);
  for_dtype(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const DropoutArgs<T> args{x.data<const T>(), dropout, width, out.data<T>()};
    parallel_for(0, rows, 1 + 16384 / (width + 1), [&](int64_t begin, int64_t end) { dropout_rows(args, begin, end); });
  });
  return out;
}

}  // namespace fastbert
