// The registered encoder_layer operators of the CPU backend, for training; fastbert/ops/encoder_layer.py has their
// schemas.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace fastbert {

std::vector<at::Tensor> encoder_layer_fwd_cpu(const at::Tensor& x, const at::Tensor& cu_seqlens, at::TensorList weights,
                                              at::TensorList biases, at::TensorList norms,
                                              const std::optional<at::Tensor>& philox, at::ArrayRef<double> dropouts,
                                              at::ArrayRef<double> eps, int64_t num_heads, c10::string_view activation,
                                              at::ScalarType dtype);

std::vector<at::Tensor> encoder_layer_bwd_cpu(const at::Tensor& dout, const at::Tensor& x, const at::Tensor& cu_seqlens,
                                              at::TensorList weights, at::TensorList norms, at::TensorList kept,
                                              const std::optional<at::Tensor>& philox, at::ArrayRef<double> dropouts,
                                              c10::string_view activation, bool needs_dx);

}  // namespace fastbert
