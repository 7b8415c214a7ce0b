// The tensors of add_layer_norm and, with `rms`, of add_rms_norm, checked and allocated as every backend does it.
// Absent ones are undefined.
#pragma once

#include "tensors.h"

namespace fastbert {

struct AddLayerNormFwdTensors {
  Array x, x_bias, residual, weight, bias;
  Array out, summed, mean, rstd;  // summed, mean and rstd have no rows unless they are asked for; RMSNorm has no mean
};

// make_out: for out, on a CPU; null: a new tensor.
inline AddLayerNormFwdTensors add_layer_norm_fwd_tensors(const Array& x, const OptionalArray& x_bias,
                                                         const OptionalArray& residual, const Array& weight,
                                                         const OptionalArray& bias, bool return_sum, bool return_stats,
                                                         bool rms, Device device, MakeArray make_out = nullptr) {
  check(x.dim() == 2, "x has shape ", x.sizes(), ", expected (total_tokens, hidden_size)");
  check(!rms || !bias.defined(), "RMSNorm has no bias");
  const int64_t rows = x.size(0), hidden_size = x.size(1);
  const auto dtype = x.scalar_type();
  AddLayerNormFwdTensors t;
  t.x = checked("x", x, x.sizes(), dtype, device);
  t.x_bias = checked_if_defined("x_bias", x_bias, {hidden_size}, dtype, device);
  t.residual = checked_if_defined("residual", residual, x.sizes(), dtype, device);
  t.weight = checked("weight", weight, {hidden_size}, dtype, device);
  t.bias = checked_if_defined("bias", bias, {hidden_size}, dtype, device);
  t.out = make_out == nullptr ? empty({rows, hidden_size}, t.x) : make_out({rows, hidden_size}, dtype);
  t.summed = empty({return_sum ? rows : 0, hidden_size}, t.x);
  t.mean = empty({return_stats && !rms ? rows : 0}, ScalarType::Float, t.x.device());
  t.rstd = empty({return_stats ? rows : 0}, ScalarType::Float, t.x.device());
  return t;
}

struct AddLayerNormBwdTensors {
  Array dout, dsum, summed, mean, rstd, weight;
  // dx has no rows without dropout, dx_bias none without x_bias, dbias none for RMSNorm.
  Array dx, dsummed, dx_bias, dweight, dbias;
};

// make_rows: for dx and dsummed, on a CPU; null: new tensors.
inline AddLayerNormBwdTensors add_layer_norm_bwd_tensors(const Array& dout, const OptionalArray& dsum,
                                                         const Array& summed, const Array& mean, const Array& rstd,
                                                         const Array& weight, double dropout_p, bool has_x_bias,
                                                         bool rms, Device device, MakeArray make_rows = nullptr) {
  check(dout.dim() == 2, "dout has shape ", dout.sizes(), ", expected (total_tokens, hidden_size)");
  const int64_t rows = dout.size(0), hidden_size = dout.size(1);
  const auto dtype = dout.scalar_type();
  AddLayerNormBwdTensors t;
  t.dout = checked("dout", dout, dout.sizes(), dtype, device);
  t.dsum = checked_if_defined("dsum", dsum, dout.sizes(), dtype, device);
  t.summed = checked("summed", summed, dout.sizes(), dtype, device);
  t.mean = checked("mean", mean, {rms ? 0 : rows}, ScalarType::Float, device);
  t.rstd = checked("rstd", rstd, {rows}, ScalarType::Float, device);
  t.weight = checked("weight", weight, {hidden_size}, dtype, device);
  const auto make = [&](const Shape& sizes) {
    return make_rows == nullptr ? empty(sizes, t.dout) : make_rows(sizes, dtype);
  };
  t.dx = make({dropout_p > 0.0 ? rows : 0, hidden_size});
  t.dsummed = make({rows, hidden_size});
  t.dx_bias = empty({has_x_bias ? hidden_size : 0}, t.weight);
  t.dweight = empty_like(t.weight);
  t.dbias = empty({rms ? 0 : hidden_size}, t.weight);
  return t;
}

}  // namespace fastbert
