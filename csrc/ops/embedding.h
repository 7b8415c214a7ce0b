// The registered embedding operators of the CPU backend; fastbert/ops/embedding.py has their schemas.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fastbert {

at::Tensor embed_fwd_cpu(const std::optional<at::Tensor>& input_ids, const at::Tensor& position_ids,
                         const std::optional<at::Tensor>& token_type_ids, const at::Tensor& word,
                         const at::Tensor& position, const std::optional<at::Tensor>& token_type,
                         const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps);

at::Tensor embed_bwd_cpu(const at::Tensor& dout, const at::Tensor& ids, const at::Tensor& table, int64_t padding_idx);

}  // namespace fastbert
