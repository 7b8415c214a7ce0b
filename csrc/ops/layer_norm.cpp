#include "layer_norm.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "../cpu/layer_norm.h"
#include "dropout.h"
#include "tensors.h"

namespace fastbert {
namespace {

// Rows of `width` elements that are worth a thread of their own; 32 k elements is ATen's own grain.
int64_t grain_rows(int64_t width) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width)); }

// Undefined tensors leave their operand or result out.
template <typename T>
AddLayerNormFwd<T> fwd_args(const at::Tensor& x, const at::Tensor& x_bias, const at::Tensor& residual,
                            const at::Tensor& weight, const at::Tensor& bias, const Dropout& dropout, double eps,
                            const at::Tensor& out, const at::Tensor& summed, const at::Tensor& mean,
                            const at::Tensor& rstd) {
  return {data<const T>(x),
          data<const T>(x_bias),
          data<const T>(residual),
          data<const T>(weight),
          data<const T>(bias),
          dropout,
          static_cast<float>(eps),
          x.size(1),
          data<T>(out),
          data<T>(summed),
          data<float>(mean),
          data<float>(rstd)};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_fwd_cpu(
    const at::Tensor& x_, const std::optional<at::Tensor>& x_bias_, const std::optional<at::Tensor>& residual_,
    const at::Tensor& weight_, const std::optional<at::Tensor>& bias_, const std::optional<at::Tensor>& philox,
    double dropout_p, double eps, bool return_sum, bool return_stats) {
  TORCH_CHECK(x_.dim() == 2, "x has shape ", x_.sizes(), ", expected (total_tokens, hidden_size)");
  const int64_t rows = x_.size(0), hidden_size = x_.size(1);
  const auto dtype = x_.scalar_type();
  const at::Tensor x = checked("x", x_, x_.sizes(), dtype);
  const at::Tensor x_bias = checked("x_bias", x_bias_, {hidden_size}, dtype);
  const at::Tensor residual = checked("residual", residual_, x.sizes(), dtype);
  const at::Tensor weight = checked("weight", weight_, {hidden_size}, dtype);
  const at::Tensor bias = checked("bias", bias_, {hidden_size}, dtype);
  const Dropout dropout = make_dropout(dropout_p, philox);

  const at::Tensor out = at::empty({rows, hidden_size}, x.options());
  const at::Tensor summed = at::empty({return_sum ? rows : 0, hidden_size}, x.options());
  const at::Tensor mean = at::empty({return_stats ? rows : 0}, x.options().dtype(at::kFloat));
  const at::Tensor rstd = at::empty_like(mean);
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const at::Tensor none;
    const auto args = fwd_args<T>(x, x_bias, residual, weight, bias, dropout, eps, out, return_sum ? summed : none,
                                  return_stats ? mean : none, return_stats ? rstd : none);
    at::parallel_for(0, rows, grain_rows(hidden_size),
                     [&](int64_t begin, int64_t end) { add_layer_norm_fwd(args, begin, end); });
  });
  return {out, summed, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_bwd_cpu(
    const at::Tensor& dout_, const std::optional<at::Tensor>& dsum_, const at::Tensor& summed_, const at::Tensor& mean_,
    const at::Tensor& rstd_, const at::Tensor& weight_, const std::optional<at::Tensor>& philox, double dropout_p,
    bool has_x_bias) {
  TORCH_CHECK(dout_.dim() == 2, "dout has shape ", dout_.sizes(), ", expected (total_tokens, hidden_size)");
  const int64_t rows = dout_.size(0), hidden_size = dout_.size(1);
  const auto dtype = dout_.scalar_type();
  const at::Tensor dout = checked("dout", dout_, dout_.sizes(), dtype);
  const at::Tensor dsum = checked("dsum", dsum_, dout.sizes(), dtype);
  const at::Tensor summed = checked("summed", summed_, dout.sizes(), dtype);
  const at::Tensor mean = checked("mean", mean_, {rows}, at::kFloat);
  const at::Tensor rstd = checked("rstd", rstd_, {rows}, at::kFloat);
  const at::Tensor weight = checked("weight", weight_, {hidden_size}, dtype);
  const Dropout dropout = make_dropout(dropout_p, philox);

  // Chunks depend on the number of rows alone, never on the number of threads: so do the sums' last bits. At most 256
  // of them keeps the partial sums small beside the matrices; at least 32 rows each keeps their share of time small.
  const int64_t rows_per_chunk = std::max<int64_t>(32, (rows + 255) / 256);
  const int64_t chunks = (rows + rows_per_chunk - 1) / rows_per_chunk;

  const at::Tensor dx = at::empty({dropout_p > 0.0 ? rows : 0, hidden_size}, dout.options());
  const at::Tensor dsummed = at::empty({rows, hidden_size}, dout.options());
  const at::Tensor dx_bias = at::empty({has_x_bias ? hidden_size : 0}, weight.options());
  const at::Tensor dweight = at::empty_like(weight);
  const at::Tensor dbias = at::empty_like(weight);
  const at::Tensor partial = at::empty({chunks, 3, hidden_size}, mean.options());
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const AddLayerNormBwd<T> args{data<const T>(dout),
                                  data<const T>(dsum),
                                  data<const T>(summed),
                                  data<const float>(mean),
                                  data<const float>(rstd),
                                  data<const T>(weight),
                                  dropout,
                                  rows,
                                  hidden_size,
                                  rows_per_chunk,
                                  dropout_p > 0.0 ? data<T>(dx) : nullptr,
                                  data<T>(dsummed),
                                  data<float>(partial)};
    const int64_t grain = std::max<int64_t>(1, grain_rows(hidden_size) / rows_per_chunk);
    at::parallel_for(0, chunks, grain, [&](int64_t begin, int64_t end) { add_layer_norm_bwd(args, begin, end); });

    const ColumnSums<T> sums{data<const float>(partial),
                             chunks,
                             hidden_size,
                             {data<T>(dweight), data<T>(dbias), has_x_bias ? data<T>(dx_bias) : nullptr}};
    at::parallel_for(0, hidden_size, grain_rows(3 * chunks),
                     [&](int64_t begin, int64_t end) { add_column_sums(sums, begin, end); });
  });
  return {dx, dsummed, dx_bias, dweight, dbias};
}

std::function<void(int64_t, int64_t)> add_layer_norm_rows(const at::Tensor& x, const at::Tensor& x_bias,
                                                          const at::Tensor& residual, const at::Tensor& weight,
                                                          const at::Tensor& bias, double eps, const at::Tensor& out) {
  std::function<void(int64_t, int64_t)> rows;
  for_dtype(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const at::Tensor none;
    const auto args = fwd_args<T>(x, x_bias, residual, weight, bias, Dropout{0.0, 0, 0}, eps, out, none, none, none);
    rows = [args](int64_t begin, int64_t end) { add_layer_norm_fwd(args, begin, end); };
  });
  return rows;
}

}  // namespace fastbert
