#include "encoder_layers.h"

#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <cmath>

#include "attention.h"
#include "layer_norm.h"
#include "linear.h"
#include "tensors.h"
#include "workspace.h"

namespace fastbert {

at::Tensor encoder_layers_cpu(const at::Tensor& x, const at::Tensor& cu_seqlens, at::TensorList weights,
                              const c10::List<std::optional<at::Tensor>>& biases,
                              const c10::List<std::optional<at::Tensor>>& weight_scales,
                              at::ArrayRef<double> input_scales, at::TensorList norms, at::ArrayRef<double> eps,
                              int64_t num_heads, c10::string_view activation) {
  const size_t layers = weights.size() / 6;
  TORCH_CHECK(layers > 0 && weights.size() == 6 * layers && biases.size() == 6 * layers &&
                  weight_scales.size() == 6 * layers && input_scales.size() == 6 * layers &&
                  norms.size() == 4 * layers && eps.size() == 2 * layers,
              "expected 6 weights, biases, weight_scales and input_scales, 4 norms and 2 eps a layer, got ",
              weights.size(), ", ", biases.size(), ", ", weight_scales.size(), ", ", input_scales.size(), ", ",
              norms.size(), " and ", eps.size());
  TORCH_CHECK(x.dim() == 2 && num_heads > 0 && weights[0].size(0) % num_heads == 0, "num_heads is ", num_heads,
              ", the query has ", weights[0].size(0), " features");
  const auto dtype = x.scalar_type();
  const int64_t tokens = x.size(0), hidden_size = x.size(1), width = weights[0].size(0), head_dim = width / num_heads;
  for (size_t i = 0; i < 6 * layers; ++i) {
    const int64_t features = i % 6 < 3 ? width : i % 6 == 4 ? weights[i].size(0) : hidden_size;
    TORCH_CHECK(weights[i].dim() == 2 && weights[i].size(0) == features, "weight ", i % 6, " of layer ", i / 6, " is ",
                weights[i].sizes(), ", expected ", features, " features");
  }
  const auto linear = [&](size_t i) -> LinearOperand {
    return {weights[i], biases.get(i), weight_scales.get(i), input_scales[i]};
  };
  const auto without_bias = [&](size_t i) -> LinearOperand {
    return {weights[i], std::nullopt, weight_scales.get(i), input_scales[i]};
  };
  const auto vector = [&](const char* name, const std::optional<at::Tensor>& t) {
    return checked(name, t, {hidden_size}, dtype);
  };

  // One set of buffers serves all layers: it stays in the cache.
  const at::Tensor out = at::empty_like(x, at::MemoryFormat::Contiguous);
  const at::Tensor product = workspace(out.sizes(), dtype), middle = workspace(out.sizes(), dtype);
  const at::Tensor context = workspace({tokens, num_heads, head_dim}, dtype);
  const std::vector<at::Tensor> qkv{workspace({tokens, width}, dtype), workspace({tokens, width}, dtype),
                                    workspace({tokens, width}, dtype)};
  const auto heads = [&](const at::Tensor& t) { return t.view({tokens, num_heads, head_dim}); };
  const at::Tensor q = heads(qkv[0]), k = heads(qkv[1]), v = heads(qkv[2]),
                   flat_context = context.view({tokens, width});
  const double softmax_scale = 1.0 / std::sqrt(static_cast<double>(head_dim));

  at::Tensor hidden = x.contiguous();
  for (size_t layer = 0; layer < layers; ++layer) {
    const size_t first = 6 * layer;
    linear_rows(hidden, {linear(first), linear(first + 1), linear(first + 2)}, qkv, dtype, nullptr);
    attention_rows(q, k, v, cu_seqlens, softmax_scale, context);
    // Both LayerNorms run over rows as the products before them finish them.
    const at::Tensor out_bias = vector("attention output bias", biases.get(first + 3));
    const at::Tensor down_bias = vector("down bias", biases.get(first + 5));
    const at::Tensor norm = vector("norm", norms[4 * layer]), norm_bias = vector("norm bias", norms[4 * layer + 1]);
    const at::Tensor norm2 = vector("norm", norms[4 * layer + 2]),
                     norm2_bias = vector("norm bias", norms[4 * layer + 3]);
    linear_rows(flat_context, {without_bias(first + 3)}, {product}, dtype,
                add_layer_norm_rows(product, out_bias, hidden, norm, norm_bias, eps[2 * layer], middle));
    feed_forward_rows(middle, linear(first + 4), without_bias(first + 5), activation, product, at::Tensor(), dtype,
                      add_layer_norm_rows(product, down_bias, middle, norm2, norm2_bias, eps[2 * layer + 1], out));
    hidden = out;  // nothing reads a layer's input once its last product runs
  }
  return out;
}

}  // namespace fastbert
