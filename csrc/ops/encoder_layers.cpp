#include "encoder_layers.h"

#include <algorithm>

#include "attention.h"
#include "layer_spec.h"
#include "team.h"
#include "tensors.h"
#include "workspace.h"

namespace fastbert {

namespace {

void run_in_turn(const Array& x, const Array& cu_seqlens, const LayerStack& stack, const AttentionTables& tables,
                 const RelativeLists& relative, const std::vector<int64_t>& versions, Comparison comparison,
                 const Array& out) {
  const std::vector<int64_t>& layers = stack.layers;
  const std::vector<LayerSpec>& specs = stack.specs;
  check(x.dim() == 2 && !layers.empty(), "x has shape ", x.sizes(), ", there are ", layers.size(), " layers");
  for (const int64_t i : layers) check(i >= 0 && i < static_cast<int64_t>(specs.size()), "there are no numbers ", i);
  const auto spec_of = [&](size_t layer) -> const LayerSpec& { return specs[static_cast<size_t>(layers[layer])]; };
  const auto dtype = x.scalar_type();
  const int64_t tokens = x.size(0), hidden_size = x.size(1);

  // One set of buffers serves all layers: it stays in the cache. `normed` has what the last norm gave, but for the one
  // behind a layer, which gives `out`.
  const Array none;
  const auto make = [&](const Shape& shape) { return workspace(shape, dtype); };
  Heads heads;
  Array context, flat_context, product, normed;
  AttentionOptions attention;
  const std::optional<double>& final_eps = stack.final_eps;

  LayerReader reader(
      {&stack.weights, &stack.biases, &stack.weight_scales, &stack.input_scales, &stack.norms, &versions}, hidden_size,
      dtype, comparison);
  const auto final_norm = [&](const LayerSpec& last) -> NormOperand {
    const size_t left = reader.norms_left();
    check(final_eps.has_value() ? left == 1 || left == 2 : left == 0, "there are ", left, " tensors of norms too many");
    return final_eps.has_value() ? reader.final_norm_ahead(last, left == 1 ? 1 : 3, *final_eps) : NormOperand();
  };
  RelativeReader terms(relative);
  LayerOperands layer;
  Array hidden = contiguous(x);  // what the next residual is
  bool is_normed = false;        // whether the layer before left in `normed` what the next one begins with
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerSpec& spec = spec_of(i);
    const bool is_last = i + 1 == layers.size();
    reader.read(spec, layer);
    if (i == 0 || layers[i] != layers[i - 1]) {
      attention = attention_options(spec, tables);
      heads = make_heads(spec, tokens, make);
      // Attention reads the queries of a head's block of rows before it writes there, and behind it nothing reads keys
      // and values: their memory serves the rest of the layer. What a pre-norm layer leaves in `normed` is read by the
      // next one, while it writes its own.
      const bool are_apart = heads.flat.size() == 3;
      const bool has_room = are_apart && heads.flat[1].sizes() == x.sizes();
      context = are_apart ? heads.q : workspace({tokens, spec.num_heads, spec.head_dim}, dtype);
      flat_context = context.view({tokens, spec.num_heads * spec.head_dim});
      product = has_room ? heads.flat[1] : workspace(x.sizes(), dtype);
      if (has_room && !spec.norm_first) {
        normed = heads.flat[2];
      } else if (!is_normed) {
        normed = workspace(x.sizes(), dtype);
      }
    }

    if (spec.begins_with_norm() && !is_normed) {
      parallel_for(0, tokens, 16, add_norm_rows(hidden, none, none, layer.norm(LayerSpec::kAttention), normed, none));
    }
    linear_rows(spec.begins_with_norm() ? normed : hidden, layer.projections(spec), heads.flat, dtype,
                norm_heads_rows(spec, layer, heads));
    if (spec.relative == 0) {
      attention_rows(heads.q, heads.k, heads.v, cu_seqlens, attention, context);
    } else {
      attention_relative_rows(heads.q, heads.k, heads.v, cu_seqlens, attention, terms.read(spec), context);
    }

    // What ends a sublayer, residual and norm, runs over rows as the product before it finishes them.
    const size_t output = spec.attention_output(), down = spec.down();
    const auto end_rows = [&](LayerSpec::NormOf output_norm, const Array& bias, const Array& residual,
                              const NormOperand& norm, const Array& normed_out, const Array& sum_out) -> RowsDone {
      const NormOperand& of_product = layer.norm(output_norm);
      if (!of_product.weight.defined()) return add_norm_rows(product, bias, residual, norm, normed_out, sum_out);
      // The product's norm, and then the sum's, of few enough rows for these to stay in the first caches.
      return [first = add_norm_rows(product, bias, none, of_product, product, none),
              second = add_norm_rows(product, none, residual, norm, normed_out, sum_out)](int64_t begin, int64_t end) {
        constexpr int64_t kRows = 16;
        for (int64_t row = begin; row < end; row += kRows) {
          first(row, std::min(row + kRows, end));
          second(row, std::min(row + kRows, end));
        }
      };
    };
    const auto end_attention = [&](const RowsDone& end) {
      linear_rows(flat_context, {layer.without_bias(output)}, {product}, dtype, end);
    };
    const auto end_layer = [&](const RowsDone& end) {
      feed_forward_rows(normed, layer.feed_forward(spec, stack.activation, {0.0, 0, 0}), product, none, dtype, end);
    };
    const NormOperand next = is_last ? final_norm(spec) : reader.norm_ahead(spec_of(i + 1));
    is_normed = spec.norm_first && next.weight.defined();
    if (spec.norm_first) {
      end_attention(end_rows(LayerSpec::kAttentionOutput, layer.bias[output], hidden,
                             layer.norm(LayerSpec::kFeedForward), normed, out));
      end_layer(end_rows(LayerSpec::kFeedForwardOutput, layer.bias[down], out, next,
                         !is_normed ? none
                         : is_last  ? out
                                    : normed,
                         is_last && is_normed ? none : out));
    } else {
      check(!is_last || !next.weight.defined(), "there is a norm behind a post-norm layer");
      end_attention(end_rows(LayerSpec::kAttentionOutput, layer.bias[output], hidden, layer.norm(LayerSpec::kAttention),
                             normed, none));
      end_layer(end_rows(LayerSpec::kFeedForwardOutput, layer.bias[down], normed, layer.norm(LayerSpec::kFeedForward),
                         out, none));
    }
    hidden = out;  // nothing reads a layer's input once its last product runs
  }
  terms.finish();
}

// What the weights take as products in `dtype` read them. Of those that are packed only, int8 or not: as int8 if any
// is.
int64_t packed_bytes_of(const LayerStack& stack, ScalarType dtype) {
  const int64_t size = element_size(format_for(dtype)), packed_size = stack.weight_scales.size() > 0 ? 1 : size;
  int64_t bytes = 0;
  for (size_t i = 0; i < stack.weights.size(); ++i) {
    const Array weight = stack.weights[i];
    const ScalarType type = weight.scalar_type();
    bytes += weight.numel() * (type == ScalarType::Char ? 1 : type == ScalarType::Byte ? packed_size : size);
  }
  return bytes;
}

}  // namespace

void run_layers(const Array& x, const Array& cu_seqlens, const LayerStack& stack, const AttentionTables& tables,
                const RelativeLists& relative, const std::vector<int64_t>& versions, Comparison comparison,
                const Array& out) {
  const StackProducts products(packed_bytes_of(stack, x.scalar_type()));
  with_team([&] { run_in_turn(x, cu_seqlens, stack, tables, relative, versions, comparison, out); });
}

Array encoder_layers_cpu(const Array& x, const Array& cu_seqlens, const List<Array>& weights, const List<Array>& biases,
                         const List<Array>& weight_scales, const List<Array>& input_scales, const List<Array>& norms,
                         const std::string& activation, const std::vector<int64_t>& layers,
                         const std::vector<int64_t>& ints, const std::vector<double>& floats,
                         const std::optional<double>& final_eps, const std::vector<Array>& rotary,
                         const std::vector<int64_t>& rotary_layouts, const OptionalArray& window_positions,
                         const OptionalArray& num_keys, const OptionalArray& relative_rows,
                         const OptionalArray& relative_positions, const std::vector<Array>& relative,
                         const std::vector<int64_t>& versions) {
  const std::vector<LayerSpec> specs = layer_specs(ints, floats);
  const Array out = empty_like(x);
  run_layers(x, cu_seqlens,
             {weights, biases, weight_scales, input_scales, norms, activation_of(activation), layers, specs, final_eps},
             {rotary, rotary_layouts, window_positions, num_keys}, {relative_rows, relative_positions, relative},
             versions, comparison_of_call(), out);
  return out;
}

}  // namespace fastbert
