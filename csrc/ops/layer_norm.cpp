#include "layer_norm.h"

#include <algorithm>

#include "../cpu/layer_norm.h"
#include "dropout.h"
#include "layer_norm_tensors.h"
#include "tensors.h"
#include "workspace.h"

namespace fastbert {
namespace {

// Rows of `width` elements that are worth a thread of their own; 32 k elements is ATen's own grain.
int64_t grain_rows(int64_t width) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width)); }

Norm norm_of(bool rms, bool zero_centered) {
  check(rms || !zero_centered, "only RMSNorm is zero-centred");
  return zero_centered ? Norm::kZeroCenteredRms : rms ? Norm::kRms : Norm::kLayer;
}

// Undefined tensors leave their operand or result out.
template <typename T>
AddLayerNormFwd<T> fwd_args(Norm norm, const Array& x, const Array& x_bias, const Array& residual, const Array& weight,
                            const Array& bias, const Dropout& dropout, double eps, const Array& out,
                            const Array& summed, const Array& mean, const Array& rstd) {
  return {norm,
          x.data<const T>(),
          x_bias.data<const T>(),
          residual.data<const T>(),
          weight.data<const T>(),
          bias.data<const T>(),
          dropout,
          static_cast<float>(eps),
          x.size(1),
          out.data<T>(),
          summed.data<T>(),
          mean.data<float>(),
          rstd.data<float>()};
}

}  // namespace

std::tuple<Array, Array, Array, Array> add_layer_norm_fwd_cpu(const Array& x, const OptionalArray& x_bias,
                                                              const OptionalArray& residual, const Array& weight,
                                                              const OptionalArray& bias, const OptionalArray& philox,
                                                              double dropout_p, double eps, bool return_sum,
                                                              bool return_stats, bool rms, bool zero_centered) {
  return add_layer_norm(x, x_bias, residual, {norm_of(rms, zero_centered), weight, bias, eps}, philox, dropout_p,
                        return_sum, return_stats, empty);
}

std::tuple<Array, Array, Array, Array> add_layer_norm(const Array& x, const OptionalArray& x_bias,
                                                      const OptionalArray& residual, const NormOperand& norm,
                                                      const OptionalArray& philox, double dropout_p, bool return_sum,
                                                      bool return_stats, MakeArray make_out) {
  const bool rms = norm.type != Norm::kLayer;
  const auto t = add_layer_norm_fwd_tensors(x, x_bias, residual, norm.weight, norm.bias, return_sum, return_stats, rms,
                                            cpu(), make_out);
  const Dropout dropout = make_dropout(dropout_p, philox);
  for_dtype(t.x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const Array none;
    const auto args =
        fwd_args<T>(norm.type, t.x, t.x_bias, t.residual, t.weight, t.bias, dropout, norm.eps, t.out,
                    return_sum ? t.summed : none, return_stats && !rms ? t.mean : none, return_stats ? t.rstd : none);
    parallel_for(0, t.x.size(0), grain_rows(t.x.size(1)),
                 [&](int64_t begin, int64_t end) { add_layer_norm_fwd(args, begin, end); });
  });
  return {t.out, t.summed, t.mean, t.rstd};
}

Array norm_of_rows(const Array& x_, const NormOperand& norm, MakeArray make_out) {
  const Array x = checked("x", x_, {x_.size(0), norm.weight.size(0)}, norm.weight.scalar_type());
  const Array out = make_out(x.sizes(), x.scalar_type()), none;
  parallel_for(0, x.size(0), grain_rows(x.size(1)), add_norm_rows(x, none, none, norm, out, none));
  return out;
}

std::tuple<Array, Array, Array, Array, Array> add_layer_norm_bwd_cpu(const Array& dout, const OptionalArray& dsum,
                                                                     const Array& summed, const Array& mean,
                                                                     const Array& rstd, const Array& weight,
                                                                     const OptionalArray& philox, double dropout_p,
                                                                     bool has_x_bias, bool rms, bool zero_centered) {
  return add_layer_norm_gradients(dout, {}, dsum, summed, mean, rstd, weight, philox, dropout_p, has_x_bias,
                                  norm_of(rms, zero_centered), empty);
}

std::tuple<Array, Array, Array, Array, Array> add_layer_norm_gradients(const Array& dout, const Array& dout_more,
                                                                       const OptionalArray& dsum, const Array& summed,
                                                                       const Array& mean, const Array& rstd,
                                                                       const Array& weight, const OptionalArray& philox,
                                                                       double dropout_p, bool has_x_bias, Norm norm,
                                                                       MakeArray make_rows) {
  const bool rms = norm != Norm::kLayer;
  const auto t =
      add_layer_norm_bwd_tensors(dout, dsum, summed, mean, rstd, weight, dropout_p, has_x_bias, rms, cpu(), make_rows);
  const Array more = checked_if_defined("dout_more", dout_more, t.dout.sizes(), t.dout.scalar_type(), cpu());
  const int64_t rows = t.dout.size(0), hidden_size = t.dout.size(1);
  const Dropout dropout = make_dropout(dropout_p, philox);

  // Chunks depend on the number of rows alone, never on the number of threads: so do the sums' last bits. At most 256
  // of them keeps the partial sums small beside the matrices; at least 32 rows each keeps their share of time small.
  const int64_t rows_per_chunk = std::max<int64_t>(32, (rows + 255) / 256);
  const int64_t chunks = (rows + rows_per_chunk - 1) / rows_per_chunk;

  const Array partial = workspace({chunks, 3, hidden_size}, ScalarType::Float);
  for_dtype(t.dout.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const AddLayerNormBwd<T> args{t.dout.data<const T>(),
                                  more.data<const T>(),
                                  t.dsum.data<const T>(),
                                  t.summed.data<const T>(),
                                  rms ? nullptr : t.mean.data<const float>(),
                                  t.rstd.data<const float>(),
                                  t.weight.data<const T>(),
                                  weight_offset(norm),
                                  dropout,
                                  rows,
                                  hidden_size,
                                  rows_per_chunk,
                                  dropout_p > 0.0 ? t.dx.data<T>() : nullptr,
                                  t.dsummed.data<T>(),
                                  partial.data<float>()};
    const int64_t grain = std::max<int64_t>(1, grain_rows(hidden_size) / rows_per_chunk);
    parallel_for(0, chunks, grain, [&](int64_t begin, int64_t end) { add_layer_norm_bwd(args, begin, end); });

    const ColumnSums<T> sums{
        partial.data<const float>(),
        chunks,
        hidden_size,
        {t.dweight.data<T>(), rms ? nullptr : t.dbias.data<T>(), has_x_bias ? t.dx_bias.data<T>() : nullptr}};
    parallel_for(0, hidden_size, grain_rows(3 * chunks),
                 [&](int64_t begin, int64_t end) { add_column_sums(sums, begin, end); });
  });
  return {t.dx, t.dsummed, t.dx_bias, t.dweight, t.dbias};
}

Array add_dropped(const Array& x_, const OptionalArray& x_bias_, const OptionalArray& residual_,
                  const OptionalArray& philox, double dropout_p) {
  check(x_.dim() == 2, "x has shape ", x_.sizes(), ", expected (total_tokens, hidden_size)");
  const auto dtype = x_.scalar_type();
  const Array x = checked("x", x_, x_.sizes(), dtype);
  const Array x_bias = checked_if_defined("x_bias", x_bias_, {x.size(1)}, dtype, cpu());
  const Array residual = checked_if_defined("residual", residual_, x.sizes(), dtype, cpu());
  const Dropout dropout = make_dropout(dropout_p, philox);
  const Array out = empty_like(x);
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const Array none;
    const auto args = fwd_args<T>(Norm::kNone, x, x_bias, residual, none, none, dropout, 0.0, out, none, none, none);
    parallel_for(0, x.size(0), grain_rows(x.size(1)),
                 [&](int64_t begin, int64_t end) { add_layer_norm_fwd(args, begin, end); });
  });
  return out;
}

RowsDone add_norm_rows(const Array& product, const Array& x_bias, const Array& residual, const NormOperand& norm,
                       const Array& normed_out, const Array& sum_out) {
  RowsDone rows;
  for_dtype(product.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const Norm norm_type = norm.weight.defined() ? norm.type : Norm::kNone;
    const Array none;
    const auto args = fwd_args<T>(norm_type, product, x_bias, residual, norm.weight, norm.bias, Dropout{0.0, 0, 0},
                                  norm.eps, normed_out, sum_out, none, none);
    rows = [args](int64_t begin, int64_t end) { add_layer_norm_fwd(args, begin, end); };
  });
  return rows;
}

}  // namespace fastbert
