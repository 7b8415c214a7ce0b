#include "encoder_layers.h"

#include <cmath>

#include "attention.h"
#include "layer_norm.h"
#include "linear.h"
#include "packed_weights.h"
#include "tensors.h"
#include "workspace.h"

namespace fastbert {

Array encoder_layers_cpu(const Array& x, const Array& cu_seqlens, const std::vector<Array>& weights,
                         const std::vector<OptionalArray>& biases, const std::vector<OptionalArray>& weight_scales,
                         const std::vector<double>& input_scales, const std::vector<Array>& norms,
                         const std::vector<double>& eps, int64_t num_heads, const std::string& activation,
                         const std::vector<int64_t>& versions) {
  const size_t layers = weights.size() / 6;
  check(layers > 0 && weights.size() == 6 * layers && biases.size() == 6 * layers &&
            weight_scales.size() == 6 * layers && input_scales.size() == 6 * layers && norms.size() == 4 * layers &&
            eps.size() == 2 * layers && (versions.empty() || versions.size() == 6 * layers),
        "expected 6 weights, biases, weight_scales and input_scales, 4 norms and 2 eps a layer, got ", weights.size(),
        ", ", biases.size(), ", ", weight_scales.size(), ", ", input_scales.size(), ", ", norms.size(), " and ",
        eps.size());
  check(x.dim() == 2 && num_heads > 0 && weights[0].size(0) % num_heads == 0, "num_heads is ", num_heads,
        ", the query has ", weights[0].size(0), " features");
  const auto dtype = x.scalar_type();
  const int64_t tokens = x.size(0), hidden_size = x.size(1), width = weights[0].size(0), head_dim = width / num_heads;
  for (size_t i = 0; i < 6 * layers; ++i) {
    const int64_t features = i % 6 < 3 ? width : i % 6 == 4 ? weights[i].size(0) : hidden_size;
    check(weights[i].dim() == 2 && weights[i].size(0) == features, "weight ", i % 6, " of layer ", i / 6, " is ",
          weights[i].sizes(), ", expected ", features, " features");
  }
  const auto version = [&](size_t i) { return versions.empty() ? version_of(weights[i]) : versions[i]; };
  const auto linear = [&](size_t i) -> LinearOperand {
    return {weights[i], biases[i], weight_scales[i], input_scales[i], version(i)};
  };
  const auto without_bias = [&](size_t i) -> LinearOperand {
    return {weights[i], {}, weight_scales[i], input_scales[i], version(i)};
  };
  const auto vector = [&](const char* name, const Array& t) {
    return checked_if_defined(name, t, {hidden_size}, dtype, cpu());
  };

  // One set of buffers serves all layers: it stays in the cache.
  const Array out = empty_like(x);
  const Array product = workspace(out.sizes(), dtype), middle = workspace(out.sizes(), dtype);
  const Array context = workspace({tokens, num_heads, head_dim}, dtype);
  const std::vector<Array> qkv{workspace({tokens, width}, dtype), workspace({tokens, width}, dtype),
                               workspace({tokens, width}, dtype)};
  const auto heads = [&](const Array& t) { return t.view({tokens, num_heads, head_dim}); };
  const Array q = heads(qkv[0]), k = heads(qkv[1]), v = heads(qkv[2]), flat_context = context.view({tokens, width});
  const double softmax_scale = 1.0 / std::sqrt(static_cast<double>(head_dim));

  Array hidden = contiguous(x);
  for (size_t layer = 0; layer < layers; ++layer) {
    const size_t first = 6 * layer;
    linear_rows(hidden, {linear(first), linear(first + 1), linear(first + 2)}, qkv, dtype, nullptr);
    attention_rows(q, k, v, cu_seqlens, softmax_scale, context);
    // Both LayerNorms run over rows as the products before them finish them.
    const Array out_bias = vector("attention output bias", biases[first + 3]);
    const Array down_bias = vector("down bias", biases[first + 5]);
    const Array norm = vector("norm", norms[4 * layer]), norm_bias = vector("norm bias", norms[4 * layer + 1]);
    const Array norm2 = vector("norm", norms[4 * layer + 2]), norm2_bias = vector("norm bias", norms[4 * layer + 3]);
    linear_rows(flat_context, {without_bias(first + 3)}, {product}, dtype,
                add_layer_norm_rows(product, out_bias, hidden, norm, norm_bias, eps[2 * layer], middle));
    feed_forward_rows(middle, linear(first + 4), without_bias(first + 5), activation, product, Array(), dtype,
                      add_layer_norm_rows(product, down_bias, middle, norm2, norm2_bias, eps[2 * layer + 1], out));
    hidden = out;  // nothing reads a layer's input once its last product runs
  }
  return out;
}

}  // namespace fastbert
