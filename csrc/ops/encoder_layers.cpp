#include "encoder_layers.h"

#include <array>
#include <cmath>

#include "attention.h"
#include "layer_norm.h"
#include "linear.h"
#include "packed_weights.h"
#include "tensors.h"
#include "workspace.h"

namespace fastbert {

Array encoder_layers_cpu(const Array& x, const Array& cu_seqlens, const List<Array>& weights,
                         const List<OptionalArray>& biases, const List<OptionalArray>& weight_scales,
                         const std::vector<double>& input_scales, const List<Array>& norms,
                         const std::vector<double>& eps, int64_t num_heads, const std::string& activation,
                         const std::vector<int64_t>& versions) {
  const size_t layers = weights.size() / 6;
  check(layers > 0 && weights.size() == 6 * layers && biases.size() == 6 * layers &&
            weight_scales.size() == 6 * layers && input_scales.size() == 6 * layers && norms.size() == 4 * layers &&
            eps.size() == 2 * layers && (versions.empty() || versions.size() == 6 * layers),
        "expected 6 weights, biases, weight_scales and input_scales, 4 norms and 2 eps a layer, got ", weights.size(),
        ", ", biases.size(), ", ", weight_scales.size(), ", ", input_scales.size(), ", ", norms.size(), " and ",
        eps.size());
  const int64_t width = weights[0].size(0);
  check(x.dim() == 2 && num_heads > 0 && width % num_heads == 0, "num_heads is ", num_heads, ", the query has ", width,
        " features");
  const auto dtype = x.scalar_type();
  const int64_t tokens = x.size(0), hidden_size = x.size(1), head_dim = width / num_heads;

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
    std::array<Array, 6> weight;
    std::array<OptionalArray, 6> bias, scale;
    std::array<Array, 4> norm;
    for (size_t i = 0; i < 6; ++i) {
      weight[i] = weights[6 * layer + i];
      bias[i] = biases[6 * layer + i];
      scale[i] = weight_scales[6 * layer + i];
      const int64_t features = i < 3 ? width : i == 4 ? weight[i].size(0) : hidden_size;
      check(weight[i].dim() == 2 && weight[i].size(0) == features, "weight ", i, " of layer ", layer, " is ",
            weight[i].sizes(), ", expected ", features, " features");
    }
    // What LayerNorms take: their weights and biases, and the biases of the products before them.
    const auto check_vector = [&](const char* name, Array& t) {
      if (t.defined()) check_tensor(name, t, {hidden_size}, dtype, cpu());
      if (!t.is_contiguous()) t = contiguous(t);
    };
    for (size_t i = 0; i < 4; ++i) {
      norm[i] = norms[4 * layer + i];
      check_vector(i % 2 == 0 ? "norm" : "norm bias", norm[i]);
    }
    check_vector("attention output bias", bias[3]);
    check_vector("down bias", bias[5]);
    const auto linear = [&](size_t i, bool with_bias = true) -> LinearOperand {
      const size_t at = 6 * layer + i;
      return {weight[i], with_bias ? &bias[i] : nullptr, &scale[i], input_scales[at],
              versions.empty() ? version_of(weight[i]) : versions[at]};
    };

    linear_rows(hidden, {linear(0), linear(1), linear(2)}, qkv, dtype, nullptr);
    attention_rows(q, k, v, cu_seqlens, softmax_scale, context);
    // Both LayerNorms run over rows as the products before them finish them.
    linear_rows(flat_context, {linear(3, false)}, {product}, dtype,
                add_norm_rows(product, bias[3], hidden, {false, norm[0], norm[1], eps[2 * layer]}, middle, {}));
    feed_forward_rows(middle, linear(4), linear(5, false), activation, product, Array(), dtype,
                      add_norm_rows(product, bias[5], middle, {false, norm[2], norm[3], eps[2 * layer + 1]}, out, {}));
    hidden = out;  // nothing reads a layer's input once its last product runs
  }
  return out;
}

}  // namespace fastbert
