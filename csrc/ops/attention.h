// The registered attention operators of the CPU backend; fastbert/ops/attention.py has their schemas.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace fastbert {

std::tuple<at::Tensor, at::Tensor> attention_fwd_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                     const at::Tensor& cu_seqlens,
                                                     const std::optional<at::Tensor>& philox, double softmax_scale,
                                                     double dropout_p, bool return_stats);

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_bwd_cpu(const at::Tensor& dout, const at::Tensor& q,
                                                                 const at::Tensor& k, const at::Tensor& v,
                                                                 const at::Tensor& out, const at::Tensor& softmax_stats,
                                                                 const at::Tensor& cu_seqlens,
                                                                 const std::optional<at::Tensor>& philox,
                                                                 double softmax_scale, double dropout_p);

// attention_fwd_cpu in inference, into `out`, (total_tokens, num_heads, head_dim) like the others.
void attention_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens,
                    double softmax_scale, const at::Tensor& out);

}  // namespace fastbert
