#include "pooling.h"

#include <algorithm>
#include <cstring>

#include "../cpu/pooling.h"
#include "offsets.h"
#include "tensors.h"

namespace fastbert {

Array pooling_fwd_cpu(const Array& x_, const Array& cu_seqlens, const std::string& mode) {
  check(x_.is_cpu() && x_.dim() == 2, "x has shape ", x_.sizes(), " on ", x_.device(),
        ", expected (total_tokens, hidden_size) on cpu");
  check(mode == "mean" || mode == "cls", "mode is ", mode, ", expected mean or cls");
  const Array x = contiguous(x_), offsets = checked_offsets(cu_seqlens, x.size(0));
  const int64_t sequences = offsets.size(0) - 1, width = x.size(1);
  const Array out = empty({sequences, width}, x);
  const auto* begins = offsets.data<const int32_t>();
  const bool is_mean = mode == "mean";
  const int64_t tokens_of_one = is_mean ? std::max<int64_t>(1, x.size(0) / std::max<int64_t>(1, sequences)) : 1;
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width * tokens_of_one));
  for_dtype(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const PoolingMean<T> args{x.data<const T>(), begins, width, out.data<T>()};
    parallel_for(0, sequences, grain, [&](int64_t begin, int64_t end) {
      if (is_mean) return pooling_mean(args, begin, end);
      const auto bytes = static_cast<size_t>(width) * sizeof(T);
      for (int64_t i = begin; i < end; ++i) {
        T* const row = args.out + i * width;
        if (begins[i] < begins[i + 1]) {
          std::memcpy(row, args.x + begins[i] * width, bytes);
        } else {
          std::memset(row, 0, bytes);
        }
      }
    });
  });
  return out;
}

}  // namespace fastbert
