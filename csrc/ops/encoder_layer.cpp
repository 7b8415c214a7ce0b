#include "encoder_layer.h"

#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <cmath>

#include "attention.h"
#include "layer_norm.h"
#include "linear.h"
#include "tensors.h"

namespace fastbert {

at::Tensor encoder_layer_cpu(const at::Tensor& x, const at::Tensor& cu_seqlens, at::TensorList weights,
                             const c10::List<std::optional<at::Tensor>>& biases,
                             const c10::List<std::optional<at::Tensor>>& weight_scales,
                             at::ArrayRef<double> input_scales, at::TensorList norms, at::ArrayRef<double> eps,
                             int64_t num_heads, c10::string_view activation) {
  TORCH_CHECK(weights.size() == 6 && biases.size() == 6 && weight_scales.size() == 6 && input_scales.size() == 6,
              "expected 6 weights, biases, weight_scales and input_scales");
  TORCH_CHECK(weights[3].size(0) == x.size(1) && weights[5].size(0) == x.size(1), "attention output and down have ",
              weights[3].size(0), " and ", weights[5].size(0), " features, x ", x.size(1));
  TORCH_CHECK(norms.size() == 4 && eps.size() == 2, "expected 4 norms and 2 eps");
  TORCH_CHECK(x.dim() == 2 && num_heads > 0 && weights[0].size(0) % num_heads == 0, "num_heads is ", num_heads,
              ", the query has ", weights[0].size(0), " features");
  const auto dtype = x.scalar_type();
  const int64_t tokens = x.size(0), head_dim = weights[0].size(0) / num_heads;

  c10::List<std::optional<at::Tensor>> qkv_biases, qkv_scales;
  for (size_t i = 0; i < 3; ++i) {
    qkv_biases.push_back(biases.get(i));
    qkv_scales.push_back(weight_scales.get(i));
  }
  auto qkv = linear_cpu(x, weights.slice(0, 3), qkv_biases, qkv_scales, input_scales.slice(0, 3), "none", dtype, false);
  for (at::Tensor& t : qkv) t = t.view({tokens, num_heads, head_dim});
  const double softmax_scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  const auto [context, stats] =
      attention_fwd_cpu(qkv[0], qkv[1], qkv[2], cu_seqlens, std::nullopt, softmax_scale, 0.0, false);

  // Both LayerNorms run over rows as the products before them finish them.
  const int64_t hidden_size = x.size(1);
  const auto vector = [&](const char* name, const std::optional<at::Tensor>& t) {
    return checked(name, t, {hidden_size}, dtype);
  };
  const at::Tensor out_bias = vector("attention output bias", biases.get(3)), down_bias = vector("down bias", biases.get(5));
  const at::Tensor first_weight = vector("norm", norms[0]), first_bias = vector("norm bias", norms[1]);
  const at::Tensor second_weight = vector("norm", norms[2]), second_bias = vector("norm bias", norms[3]);
  const at::Tensor residual = x.contiguous();
  const at::Tensor product = at::empty_like(residual), middle = at::empty_like(residual), out = at::empty_like(residual);
  projection_rows(context.view({tokens, num_heads * head_dim}), weights[3], weight_scales.get(3), input_scales[3],
                  product, add_layer_norm_rows(product, out_bias, residual, first_weight, first_bias, eps[0], middle));
  feed_forward_rows(middle, weights[4], biases.get(4), weights[5], weight_scales.get(4), weight_scales.get(5),
                    input_scales.slice(4, 2), activation, product, at::Tensor(),
                    add_layer_norm_rows(product, down_bias, middle, second_weight, second_bias, eps[1], out));
  return out;
}

}  // namespace fastbert
