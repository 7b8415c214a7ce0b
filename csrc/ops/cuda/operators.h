// The registered operators of the CUDA backend; fastbert/ops/operators.py has their schemas.
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

std::tuple<at::Tensor, at::Tensor> feed_forward_cuda(const at::Tensor& x, const at::Tensor& up_weight,
                                                     const std::optional<at::Tensor>& up_bias,
                                                     const at::Tensor& down_weight, c10::string_view activation,
                                                     bool gated, bool return_pre);

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> feed_forward_bwd_cuda(
    const at::Tensor& dout, const at::Tensor& x, const at::Tensor& pre, const at::Tensor& up_weight,
    const at::Tensor& down_weight, c10::string_view activation, bool gated, bool needs_dx, bool needs_dweight,
    bool needs_dbias);

}  // namespace fastbert
