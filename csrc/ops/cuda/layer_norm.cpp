#include "../../cuda/layer_norm.h"

#include "../layer_norm_tensors.h"
#include "launch.h"
#include "operators.h"

namespace fastbert {

std::tuple<Array, Array, Array, Array> add_layer_norm_fwd_cuda(const Array& x, const OptionalArray& x_bias,
                                                               const OptionalArray& residual, const Array& weight,
                                                               const OptionalArray& bias, const OptionalArray& philox_,
                                                               double dropout_p, double eps, bool return_sum,
                                                               bool return_stats, bool rms) {
  const auto t =
      add_layer_norm_fwd_tensors(x, x_bias, residual, weight, bias, return_sum, return_stats, rms, x.device());
  check_row_width(t.x.size(1));
  Array philox;
  const AddLayerNormFwdArgs args{storage_of(x.scalar_type()),
                                 rms,
                                 t.x.data<const void>(),
                                 t.x_bias.data<const void>(),
                                 t.residual.data<const void>(),
                                 t.weight.data<const void>(),
                                 t.bias.data<const void>(),
                                 make_dropout_mask(dropout_p, philox_, x.device(), philox),
                                 static_cast<float>(eps),
                                 t.x.size(0),
                                 static_cast<int>(t.x.size(1)),
                                 t.out.data<void>(),
                                 data_if(return_sum, t.summed),
                                 data_if<float>(return_stats && !rms, t.mean),
                                 data_if<float>(return_stats, t.rstd)};
  launch_for(x, launch_add_layer_norm_fwd, args);
  return {t.out, t.summed, t.mean, t.rstd};
}

std::tuple<Array, Array, Array, Array, Array> add_layer_norm_bwd_cuda(const Array& dout, const OptionalArray& dsum,
                                                                      const Array& summed, const Array& mean,
                                                                      const Array& rstd, const Array& weight,
                                                                      const OptionalArray& philox_, double dropout_p,
                                                                      bool has_x_bias, bool rms) {
  const auto t =
      add_layer_norm_bwd_tensors(dout, dsum, summed, mean, rstd, weight, dropout_p, has_x_bias, rms, dout.device());
  const int64_t rows = t.dout.size(0);
  check_row_width(t.dout.size(1));
  const auto hidden_size = static_cast<int>(t.dout.size(1));
  const Array shares = empty({add_layer_norm_bwd_shares(rows, hidden_size), 3, hidden_size}, t.mean);
  Array philox;
  const AddLayerNormBwdArgs args{storage_of(dout.scalar_type()),
                                 t.dout.data<const void>(),
                                 t.dsum.data<const void>(),
                                 t.summed.data<const void>(),
                                 data_if<const float>(!rms, t.mean),
                                 t.rstd.data<const float>(),
                                 t.weight.data<const void>(),
                                 make_dropout_mask(dropout_p, philox_, dout.device(), philox),
                                 rows,
                                 hidden_size,
                                 data_if(dropout_p > 0.0, t.dx),
                                 t.dsummed.data<void>(),
                                 data_if(has_x_bias, t.dx_bias),
                                 t.dweight.data<void>(),
                                 data_if(!rms, t.dbias),
                                 shares.data<float>()};
  launch_for(dout, launch_add_layer_norm_bwd, args);
  return {t.dx, t.dsummed, t.dx_bias, t.dweight, t.dbias};
}

}  // namespace fastbert
