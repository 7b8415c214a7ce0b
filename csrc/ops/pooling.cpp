#include "pooling.h"

#include <algorithm>

#include "../cpu/pooling.h"
#include "offsets.h"
#include "tensors.h"

namespace fastbert {
namespace {

Pooling pooling_of(const std::string& mode) {
  check(mode == "mean" || mode == "cls" || mode == "max", "mode is ", mode, ", expected mean, cls or max");
  return mode == "mean" ? Pooling::kMean : mode == "cls" ? Pooling::kCls : Pooling::kMax;
}

// Sequences that a thread takes at least: some 32,768 numbers.
int64_t grain_of(int64_t tokens, int64_t sequences, int64_t width) {
  const int64_t tokens_of_one = std::max<int64_t>(1, tokens / std::max<int64_t>(1, sequences));
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width * tokens_of_one));
}

}  // namespace

std::tuple<Array, Array> pooling_fwd_cpu(const Array& x_, const Array& cu_seqlens, const std::string& mode,
                                         bool return_ties) {
  check(x_.is_cpu() && x_.dim() == 2, "x has shape ", x_.sizes(), " on ", x_.device(),
        ", expected (total_tokens, hidden_size) on cpu");
  const Array x = contiguous(x_), offsets = checked_offsets(cu_seqlens, x.size(0));
  const int64_t sequences = offsets.size(0) - 1, width = x.size(1);
  const Array out = empty({sequences, width}, x), ties = empty({return_ties ? sequences : 0, width}, ScalarType::Int);
  for_dtype(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const PoolingFwd<T> args{x.data<const T>(),
                             offsets.data<const int32_t>(),
                             width,
                             pooling_of(mode),
                             out.data<T>(),
                             return_ties ? ties.data<int32_t>() : nullptr};
    parallel_for(0, sequences, grain_of(x.size(0), sequences, width),
                 [&](int64_t begin, int64_t end) { pooling_fwd(args, begin, end); });
  });
  return {out, ties};
}

Array pooling_bwd_cpu(const Array& dout_, const OptionalArray& x_, const OptionalArray& out_,
                      const OptionalArray& ties_, const Array& cu_seqlens, const std::string& mode,
                      int64_t total_tokens) {
  check(dout_.is_cpu() && dout_.dim() == 2, "dout has shape ", dout_.sizes(), " on ", dout_.device(),
        ", expected (batch, hidden_size) on cpu");
  const Array dout = contiguous(dout_), offsets = checked_offsets(cu_seqlens, total_tokens);
  const int64_t sequences = offsets.size(0) - 1, width = dout.size(1);
  check(dout.size(0) == sequences, "dout has ", dout.size(0), " rows, there are ", sequences, " sequences");
  const Pooling pooling = pooling_of(mode);
  Array x, out, ties;
  if (pooling == Pooling::kMax) {
    x = checked("x", x_, {total_tokens, width}, dout.scalar_type());
    out = checked("out", out_, dout.sizes(), dout.scalar_type());
    ties = checked("ties", ties_, dout.sizes(), ScalarType::Int);
  }
  const Array dx = empty({total_tokens, width}, dout);
  const int64_t end = offsets.data<const int32_t>()[sequences];
  zero(dx.narrow(0, end, total_tokens - end));
  for_dtype(dout.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const PoolingBwd<T> args{dout.data<const T>(),
                             x.data<const T>(),
                             out.data<const T>(),
                             ties.data<const int32_t>(),
                             offsets.data<const int32_t>(),
                             width,
                             pooling,
                             dx.data<T>()};
    parallel_for(0, sequences, grain_of(total_tokens, sequences, width),
                 [&](int64_t begin, int64_t last) { pooling_bwd(args, begin, last); });
  });
  return dx;
}

}  // namespace fastbert
