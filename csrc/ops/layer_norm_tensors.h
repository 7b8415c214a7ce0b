// The tensors of add_layer_norm, checked and allocated as every backend does it. Absent ones are undefined.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "tensors.h"

namespace fastbert {

struct AddLayerNormFwdTensors {
  at::Tensor x, x_bias, residual, weight, bias;
  at::Tensor out, summed, mean, rstd;  // summed, mean and rstd have no rows unless they are asked for
};

inline AddLayerNormFwdTensors add_layer_norm_fwd_tensors(const at::Tensor& x, const std::optional<at::Tensor>& x_bias,
                                                         const std::optional<at::Tensor>& residual,
                                                         const at::Tensor& weight,
                                                         const std::optional<at::Tensor>& bias, bool return_sum,
                                                         bool return_stats, at::Device device) {
  TORCH_CHECK(x.dim() == 2, "x has shape ", x.sizes(), ", expected (total_tokens, hidden_size)");
  const int64_t rows = x.size(0), hidden_size = x.size(1);
  const auto dtype = x.scalar_type();
  AddLayerNormFwdTensors t;
  t.x = checked("x", x, x.sizes(), dtype, device);
  t.x_bias = checked("x_bias", x_bias, {hidden_size}, dtype, device);
  t.residual = checked("residual", residual, x.sizes(), dtype, device);
  t.weight = checked("weight", weight, {hidden_size}, dtype, device);
  t.bias = checked("bias", bias, {hidden_size}, dtype, device);
  t.out = at::empty({rows, hidden_size}, t.x.options());
  t.summed = at::empty({return_sum ? rows : 0, hidden_size}, t.x.options());
  t.mean = at::empty({return_stats ? rows : 0}, t.x.options().dtype(at::kFloat));
  t.rstd = at::empty_like(t.mean);
  return t;
}

struct AddLayerNormBwdTensors {
  at::Tensor dout, dsum, summed, mean, rstd, weight;
  at::Tensor dx, dsummed, dx_bias, dweight, dbias;  // dx has no rows without dropout, dx_bias none without x_bias
};

inline AddLayerNormBwdTensors add_layer_norm_bwd_tensors(const at::Tensor& dout, const std::optional<at::Tensor>& dsum,
                                                         const at::Tensor& summed, const at::Tensor& mean,
                                                         const at::Tensor& rstd, const at::Tensor& weight,
                                                         double dropout_p, bool has_x_bias, at::Device device) {
  TORCH_CHECK(dout.dim() == 2, "dout has shape ", dout.sizes(), ", expected (total_tokens, hidden_size)");
  const int64_t rows = dout.size(0), hidden_size = dout.size(1);
  const auto dtype = dout.scalar_type();
  AddLayerNormBwdTensors t;
  t.dout = checked("dout", dout, dout.sizes(), dtype, device);
  t.dsum = checked("dsum", dsum, dout.sizes(), dtype, device);
  t.summed = checked("summed", summed, dout.sizes(), dtype, device);
  t.mean = checked("mean", mean, {rows}, at::kFloat, device);
  t.rstd = checked("rstd", rstd, {rows}, at::kFloat, device);
  t.weight = checked("weight", weight, {hidden_size}, dtype, device);
  t.dx = at::empty({dropout_p > 0.0 ? rows : 0, hidden_size}, t.dout.options());
  t.dsummed = at::empty({rows, hidden_size}, t.dout.options());
  t.dx_bias = at::empty({has_x_bias ? hidden_size : 0}, t.weight.options());
  t.dweight = at::empty_like(t.weight);
  t.dbias = at::empty_like(t.weight);
  return t;
}

}  // namespace fastbert
