// The registered operators of the CUDA backend; fastbert/ops/_library.py has their schemas.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <optional>
#include <tuple>

namespace fastbert {

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_fwd_cuda(
    const at::Tensor& x, const std::optional<at::Tensor>& x_bias, const std::optional<at::Tensor>& residual,
    const at::Tensor& weight, const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& philox,
    double dropout_p, double eps, bool return_sum, bool return_stats);

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_bwd_cuda(
    const at::Tensor& dout, const std::optional<at::Tensor>& dsum, const at::Tensor& summed, const at::Tensor& mean,
    const at::Tensor& rstd, const at::Tensor& weight, const std::optional<at::Tensor>& philox, double dropout_p,
    bool has_x_bias);

at::Tensor embed_fwd_cuda(const std::optional<at::Tensor>& input_ids, const at::Tensor& position_ids,
                          const std::optional<at::Tensor>& token_type_ids, const at::Tensor& word,
                          const at::Tensor& position, const std::optional<at::Tensor>& token_type,
                          const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps);

at::Tensor bias_activation_fwd_cuda(at::Tensor& pre, const std::optional<at::Tensor>& bias,
                                    c10::string_view activation);

std::tuple<at::Tensor, at::Tensor> activation_bwd_cuda(at::Tensor& dinner, const at::Tensor& pre,
                                                       c10::string_view activation, bool needs_dbias);

}  // namespace fastbert
