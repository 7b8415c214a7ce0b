// The registered encoder_layers operator of the CPU backend; fastbert/ops/encoder_layers.py has its schema.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>

namespace fastbert {

at::Tensor encoder_layers_cpu(const at::Tensor& x, const at::Tensor& cu_seqlens, at::TensorList weights,
                              const c10::List<std::optional<at::Tensor>>& biases,
                              const c10::List<std::optional<at::Tensor>>& weight_scales,
                              at::ArrayRef<double> input_scales, at::TensorList norms, at::ArrayRef<double> eps,
                              int64_t num_heads, c10::string_view activation);

}  // namespace fastbert
