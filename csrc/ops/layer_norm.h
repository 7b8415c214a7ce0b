// The registered add_layer_norm operators of the CPU backend; fastbert/ops/layer_norm.py has their schemas.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <tuple>

namespace fastbert {

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_fwd_cpu(
    const at::Tensor& x, const std::optional<at::Tensor>& x_bias, const std::optional<at::Tensor>& residual,
    const at::Tensor& weight, const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& philox,
    double dropout_p, double eps, bool return_sum, bool return_stats);

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_bwd_cpu(
    const at::Tensor& dout, const std::optional<at::Tensor>& dsum, const at::Tensor& summed, const at::Tensor& mean,
    const at::Tensor& rstd, const at::Tensor& weight, const std::optional<at::Tensor>& philox, double dropout_p,
    bool has_x_bias);

// What runs rows [begin, end) of LayerNorm(x + x_bias + residual) into out, when x has them; x, residual and out have
// one shape and dtype, and out may be x; x_bias, residual and bias may be undefined. It holds pointers: the tensors
// must outlive it.
std::function<void(int64_t, int64_t)> add_layer_norm_rows(const at::Tensor& x, const at::Tensor& x_bias,
                                                          const at::Tensor& residual, const at::Tensor& weight,
                                                          const at::Tensor& bias, double eps, const at::Tensor& out);

}  // namespace fastbert
