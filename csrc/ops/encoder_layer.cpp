#include "encoder_layer.h"

#include <c10/util/Exception.h>

#include <cmath>

#include "attention.h"
#include "layer_norm.h"
#include "linear.h"

namespace fastbert {

at::Tensor encoder_layer_cpu(const at::Tensor& x, const at::Tensor& cu_seqlens, at::TensorList weights,
                             const c10::List<std::optional<at::Tensor>>& biases,
                             const c10::List<std::optional<at::Tensor>>& weight_scales,
                             at::ArrayRef<double> input_scales, at::TensorList norms, at::ArrayRef<double> eps,
                             int64_t num_heads, c10::string_view activation) {
  TORCH_CHECK(weights.size() == 6 && biases.size() == 6 && weight_scales.size() == 6 && input_scales.size() == 6,
              "expected 6 weights, biases, weight_scales and input_scales");
  TORCH_CHECK(norms.size() == 4 && eps.size() == 2, "expected 4 norms and 2 eps");
  TORCH_CHECK(x.dim() == 2 && num_heads > 0 && weights[0].size(0) % num_heads == 0, "num_heads is ", num_heads,
              ", the query has ", weights[0].size(0), " features");
  const auto dtype = x.scalar_type();
  const int64_t tokens = x.size(0), head_dim = weights[0].size(0) / num_heads;

  c10::List<std::optional<at::Tensor>> qkv_biases, qkv_scales, no_bias, out_scale;
  for (size_t i = 0; i < 3; ++i) {
    qkv_biases.push_back(biases.get(i));
    qkv_scales.push_back(weight_scales.get(i));
  }
  no_bias.push_back(std::nullopt);
  out_scale.push_back(weight_scales.get(3));

  auto qkv = linear_cpu(x, weights.slice(0, 3), qkv_biases, qkv_scales, input_scales.slice(0, 3), "none", dtype, false);
  for (at::Tensor& t : qkv) t = t.view({tokens, num_heads, head_dim});
  const double softmax_scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  const auto [context, stats] =
      attention_fwd_cpu(qkv[0], qkv[1], qkv[2], cu_seqlens, std::nullopt, softmax_scale, 0.0, false);
  const auto projected = linear_cpu(context.view({tokens, num_heads * head_dim}), weights.slice(3, 1), no_bias,
                                    out_scale, input_scales.slice(3, 1), "none", dtype, false);
  const at::Tensor middle = std::get<0>(add_layer_norm_fwd_cpu(projected[0], biases.get(3), x, norms[0], norms[1],
                                                               std::nullopt, 0.0, eps[0], false, false));
  const at::Tensor inner =
      std::get<0>(feed_forward_cpu(middle, weights[4], biases.get(4), weights[5], weight_scales.get(4),
                                   weight_scales.get(5), input_scales.slice(4, 2), activation, dtype, false));
  return std::get<0>(add_layer_norm_fwd_cpu(inner, biases.get(5), middle, norms[2], norms[3], std::nullopt, 0.0,
                                            eps[1], false, false));
}

}  // namespace fastbert
