#include "encoder_layers_training.h"

#include <utility>

#include "../cpu/add.h"
#include "attention.h"
#include "attention_relative.h"
#include "dropout.h"
#include "layer_spec.h"
#include "tensors.h"
#include "workspace.h"

namespace fastbert {
namespace {

// What forward keeps for backward: of a norm what it is made from, not what it gives, which backward makes again. That
// costs what fresh memory's page faults cost in forward, and is a quarter of a step's memory under autocast.
struct Kept {
  // A norm of what a sublayer gives, and of a sum.
  struct OfNorm {
    Array summed, mean, rstd;
  };
  Array first_mean, first_rstd;  // the norm that a pre-norm layer begins with
  std::vector<Array> projected;
  OfNorm query, key;  // whose sums are `projected`
  Array context, softmax_stats;
  OfNorm attention_output, feed_forward_output;
  Array summed, mean, rstd;  // the attention's end
  Array pre;
  Array last_summed, last_mean, last_rstd;  // the norm that a post-norm layer ends with
};

// Whether a norm lies between attention and feed-forward.
bool has_middle_norm(const LayerSpec& spec) { return spec.norm_first || spec.has_attention_norm(); }

// Visits those that there are, in the order of the list that forward returns after its output.
template <typename Visit>
void for_each_kept(const LayerSpec& spec, Kept& kept, const Visit& visit) {
  const auto visit_all = [&](std::initializer_list<Array*> arrays) {
    for (Array* array : arrays) visit(*array);
  };
  kept.projected.resize(spec.num_projections());
  if (spec.begins_with_norm()) visit_all({&kept.first_mean, &kept.first_rstd});
  for (Array& array : kept.projected) visit(array);
  if (spec.bits_of(LayerSpec::kQuery) != 0) visit_all({&kept.query.mean, &kept.query.rstd});
  if (spec.bits_of(LayerSpec::kKey) != 0) visit_all({&kept.key.mean, &kept.key.rstd});
  visit_all({&kept.context, &kept.softmax_stats});
  const auto visit_output = [&](LayerSpec::NormOf which, Kept::OfNorm& output) {
    if (spec.bits_of(which) != 0) visit_all({&output.summed, &output.mean, &output.rstd});
  };
  visit_output(LayerSpec::kAttentionOutput, kept.attention_output);
  visit(kept.summed);
  if (has_middle_norm(spec)) visit_all({&kept.mean, &kept.rstd});
  visit(kept.pre);
  visit_output(LayerSpec::kFeedForwardOutput, kept.feed_forward_output);
  if (!spec.norm_first) visit_all({&kept.last_summed, &kept.last_mean, &kept.last_rstd});
}

// The layer's dropouts, in the order of its spec's, of which the inner one has a seed only where it is on.
enum DropoutOf : size_t { kProbabilities, kAttentionOutput, kInner, kOutput };

OptionalArray philox_of(const OptionalArray& philox, DropoutOf which) {
  if (!philox.defined()) return {};
  check(philox.dim() == 2 && (philox.size(0) == 3 || philox.size(0) == 4), "philox has shape ", philox.sizes(),
        ", expected (3, 2) or (4, 2)");
  return philox.select(0, which == kOutput ? philox.size(0) - 1 : which);
}

Dropout inner_dropout(const LayerSpec& spec, const OptionalArray& philox) {
  const double p = spec.inner_dropout;
  return make_dropout(p, p > 0.0 ? philox_of(philox, kInner) : OptionalArray());
}

// sum += x, of one shape and dtype, without gaps.
void add_to(const Array& sum, const Array& x) {
  check(sum.sizes() == x.sizes(), "a gradient has shape ", x.sizes(), ", expected ", sum.sizes());
  for_dtype(sum.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    parallel_for(0, sum.numel(), 32768,
                 [&](int64_t begin, int64_t end) { fastbert::add_to(sum.data<T>(), x.data<const T>(), begin, end); });
  });
}

// The end of a sublayer: dropout(product + bias) + residual, and the norm of that, if there is one, in memory of
// make_out.
struct End {
  Array out, summed, mean, rstd;
};

End end_sublayer(const Array& product, const Array& bias, const Array& residual, const NormOperand& norm,
                 const OptionalArray& philox, double dropout_p, MakeArray make_out) {
  if (!norm.weight.defined()) {
    const Array sum = add_dropped(product, bias, residual, philox, dropout_p);
    return {sum, sum, {}, {}};
  }
  const auto [out, summed, mean, rstd] =
      add_layer_norm(product, bias, residual, norm, philox, dropout_p, true, true, make_out);
  return {out, summed, mean, rstd};
}

// Of heads, (total_tokens, heads, head_dim): a row for each head of each token.
Array rows_of_heads(const Array& heads) { return heads.view({heads.size(0) * heads.size(1), heads.size(2)}); }

// Queries or keys, normed where the layer does that, in memory that the next call uses again.
Array norm_heads(const Array& heads, const NormOperand& norm, Kept::OfNorm& kept) {
  if (!norm.weight.defined()) return heads;
  Array out;
  std::tie(out, std::ignore, kept.mean, kept.rstd) =
      add_layer_norm(rows_of_heads(heads), {}, {}, norm, {}, 0.0, false, true, workspace);
  return out.view(heads.sizes());
}

// What a norm before the residual makes of a sublayer's product + bias; without one the product.
Array norm_output(const Array& product, const Array& bias, const NormOperand& norm, Kept::OfNorm& kept) {
  if (!norm.weight.defined()) return product;
  Array out;
  std::tie(out, kept.summed, kept.mean, kept.rstd) =
      add_layer_norm(product, bias, {}, norm, {}, 0.0, true, true, workspace);
  return out;
}

// What a layer is given: `kept`, or where the layer below ends with a norm, that of it.
struct Input {
  Array kept;
  NormOperand norm;

  Array rows() const { return norm.weight.defined() ? norm_of_rows(kept, norm, workspace) : kept; }
};

struct EndGradients {
  Array dproduct, dresidual, dbias, dnorm, dnorm_bias;
};

// A layer's or a sublayer's gradient is dout + more, of which `more` may be undefined: what adds them up is what
// reads them.
struct Sum {
  Array dout, more;

  // In dout's memory.
  Array added() const {
    if (more.defined()) add_to(dout, more);
    return dout;
  }
};

// dsum, which may be undefined, is what the sum's gradient has from elsewhere; only with a norm.
EndGradients end_gradients(const Sum& gradient, const OptionalArray& dsum, const Array& summed, const Array& mean,
                           const Array& rstd, const NormOperand& norm, const OptionalArray& philox, double dropout_p,
                           bool has_bias, MakeArray make_rows) {
  if (!norm.weight.defined()) {
    const Array dout = gradient.added();
    const Array dproduct = dropout_p > 0.0 ? dropout_cpu(dout, philox, dropout_p) : dout;
    return {dproduct, dout, has_bias ? bias_gradient(dproduct, dout.scalar_type()) : Array(), {}, {}};
  }
  const auto [dproduct, dsummed, dbias, dnorm, dnorm_bias] =
      add_layer_norm_gradients(gradient.dout, gradient.more, dsum, summed, mean, rstd, norm.weight, philox, dropout_p,
                               has_bias, norm.type, make_rows);
  // Without dropout a sum's gradient is its product's.
  return {dropout_p > 0.0 ? dproduct : dsummed, dsummed, dbias, dnorm, dnorm_bias};
}

// The layers of a call: of each its spec, and where its weights begin in their list.
struct Stack {
  std::vector<LayerSpec> specs;
  std::vector<size_t> first_weight;
};

Stack stack_of(const std::vector<int64_t>& layers, const std::vector<int64_t>& ints, const std::vector<double>& floats,
               size_t num_weights) {
  const std::vector<LayerSpec> specs = layer_specs(ints, floats);
  check(!layers.empty(), "there are no layers");
  Stack stack;
  size_t weights = 0;
  for (const int64_t i : layers) {
    check(i >= 0 && i < static_cast<int64_t>(specs.size()), "there are no numbers ", i);
    const LayerSpec& spec = specs[static_cast<size_t>(i)];
    check(spec.scales == 0, "int8 weights have no gradients");
    stack.specs.push_back(spec);
    stack.first_weight.push_back(weights);
    weights += spec.num_leaves();
  }
  check(num_weights == weights, "got ", num_weights, " weights, expected ", weights, " weights");
  return stack;
}

// Of layer i.
OptionalArray philox_of_layer(const OptionalArray& philox, size_t i, size_t layers) {
  if (!philox.defined()) return {};
  check(philox.dim() == 3 && philox.size(0) == static_cast<int64_t>(layers), "philox has shape ", philox.sizes(),
        ", expected (", layers, ", 3, 2) or (", layers, ", 4, 2)");
  return philox.select(0, static_cast<int64_t>(i));
}

Array flat(const Array& heads) { return heads.view({heads.size(0), heads.size(1) * heads.size(2)}); }

// What the layers of a call have in common.
struct Shared {
  const Array& cu_seqlens;
  Activation activation;
  AttentionTables tables;
};

// The layer over x; returns what it gives, and fills `kept`. make_out: for what a norm at its end gives.
Array layer_forward(const Array& x, const LayerSpec& spec, const LayerOperands& layer, const OptionalArray& philox,
                    const RelativeInputs& relative, const Shared& shared, ScalarType dtype, MakeArray make_out,
                    Kept& kept) {
  const size_t output = spec.attention_output(), up = spec.first_up(), down = spec.down();
  Array first = x;
  if (spec.begins_with_norm()) {
    std::tie(first, std::ignore, kept.first_mean, kept.first_rstd) =
        add_layer_norm(x, {}, {}, layer.norm(LayerSpec::kAttention), {}, 0.0, false, true, workspace);
  }
  const Heads heads = make_heads(spec, x.size(0), [&](const Shape& shape) { return empty(shape, dtype); });
  linear_rows(first, layer.projections(spec), heads.flat, dtype, nullptr);
  kept.projected = heads.whole;
  const Array q = norm_heads(heads.q, layer.norm(LayerSpec::kQuery), kept.query);
  const Array k = norm_heads(heads.k, layer.norm(LayerSpec::kKey), kept.key);
  const AttentionOptions options = attention_options(spec, shared.tables);
  const OptionalArray of_probabilities = philox_of(philox, kProbabilities);
  std::tie(kept.context, kept.softmax_stats) =
      spec.relative == 0
          ? attention_fwd_cpu(q, k, heads.v, shared.cu_seqlens, of_probabilities, options, spec.attention_dropout, true)
          : attention_relative_fwd_cpu(q, k, heads.v, shared.cu_seqlens, of_probabilities, options, relative,
                                       spec.attention_dropout, true);

  // The sums of residual and product are in x's dtype: where that is wider, the product is not rounded on its way.
  const Array product = workspace(x.sizes(), x.scalar_type());
  linear_rows(flat(kept.context), {layer.without_bias(output)}, {product}, dtype, nullptr);
  const Array none;
  const auto bias_of = [&](size_t i, LayerSpec::NormOf which) -> const Array& {
    return spec.bits_of(which) != 0 ? none : layer.bias[i];
  };
  const End middle = end_sublayer(
      norm_output(product, layer.bias[output], layer.norm(LayerSpec::kAttentionOutput), kept.attention_output),
      bias_of(output, LayerSpec::kAttentionOutput), x, layer.middle_norm(spec), philox_of(philox, kAttentionOutput),
      spec.attention_output_dropout, workspace);
  std::tie(kept.summed, kept.mean, kept.rstd) = std::tie(middle.summed, middle.mean, middle.rstd);

  const FeedForwardOperand feed_forward = layer.feed_forward(spec, shared.activation, inner_dropout(spec, philox));
  kept.pre = empty({x.size(0), static_cast<int64_t>(spec.num_ups()) * layer.weight[up].size(0)}, dtype);
  feed_forward_rows(middle.out, feed_forward, product, kept.pre, dtype, nullptr);
  const End last = end_sublayer(
      norm_output(product, layer.bias[down], layer.norm(LayerSpec::kFeedForwardOutput), kept.feed_forward_output),
      bias_of(down, LayerSpec::kFeedForwardOutput), spec.norm_first ? middle.summed : middle.out,
      spec.norm_first ? NormOperand() : layer.norm(LayerSpec::kFeedForward), philox_of(philox, kOutput),
      spec.feed_forward_dropout, make_out);
  std::tie(kept.last_summed, kept.last_mean, kept.last_rstd) = std::tie(last.summed, last.mean, last.rstd);

  return last.out;
}

struct LayerGradients {
  Sum dx;
  std::array<Array, LayerOperands::kMostLeaves> dweight, dbias;
  std::array<Array, 2 * LayerSpec::kNorms> dnorms;  // as a spec's bits count them
  RelativeGradients drelative;
};

// `all_weights`: of all layers, of which this one's begin at `first_weight`. dx lies in memory of make_dx.
LayerGradients layer_backward(const Sum& dout, const Input& input, const Kept& kept, const LayerSpec& spec,
                              const LayerOperands& layer, const List<Array>& all_weights, size_t first_weight,
                              const OptionalArray& philox, const RelativeInputs& relative, const Shared& shared,
                              bool needs_dx, MakeArray make_dx) {
  std::array<Array, LayerOperands::kMostLeaves> weights;
  for (size_t i = 0; i < spec.num_leaves(); ++i) weights[i] = all_weights[first_weight + i];
  const size_t output = spec.attention_output(), up = spec.first_up(), down = spec.down();
  const Heads heads(spec, kept.projected);
  const auto dtype = kept.context.scalar_type();
  const auto has_bias = [&](size_t i) { return (spec.biases >> i & 1) != 0; };
  LayerGradients gradients;
  auto& [gradient_of_x, dweight, dbias, dnorms, drelative] = gradients;
  // A norm's that is not at a sublayer's end: that of its sum, from that of what it gave.
  const auto norm_gradient = [&](LayerSpec::NormOf which, const Array& dnormed, const Kept::OfNorm& of_norm,
                                 bool has_bias) {
    const NormOperand& norm = layer.norm(which);
    const auto [dx, dsummed, dx_bias, dnorm, dnorm_bias] =
        add_layer_norm_gradients(dnormed, {}, {}, of_norm.summed, of_norm.mean, of_norm.rstd, norm.weight, {}, 0.0,
                                 has_bias, norm.type, workspace);
    gradients.dnorms[2 * which] = dnorm;
    gradients.dnorms[2 * which + 1] = dnorm_bias;
    return std::pair<Array, Array>(dsummed, dx_bias);
  };
  // That of the product at a sublayer's end and of its bias, from that of what its residual is added to.
  const auto output_gradient = [&](LayerSpec::NormOf which, const Kept::OfNorm& of_norm, size_t i,
                                   const EndGradients& end) {
    if (spec.bits_of(which) == 0) return std::pair<Array, Array>(end.dproduct, end.dbias);
    return norm_gradient(which, end.dproduct, of_norm, has_bias(i));
  };
  const auto has_end_bias = [&](size_t i, LayerSpec::NormOf which) { return has_bias(i) && spec.bits_of(which) == 0; };

  const EndGradients last =
      end_gradients(dout, {}, kept.last_summed, kept.last_mean, kept.last_rstd,
                    spec.norm_first ? NormOperand() : layer.norm(LayerSpec::kFeedForward), philox_of(philox, kOutput),
                    spec.feed_forward_dropout, has_end_bias(down, LayerSpec::kFeedForwardOutput), workspace);
  Array dproduct;
  std::tie(dproduct, dbias[down]) =
      output_gradient(LayerSpec::kFeedForwardOutput, kept.feed_forward_output, down, last);
  std::vector<Array> ups;
  bool has_up_biases = false;
  for (size_t i = up; i < down; ++i) {
    ups.push_back(weights[i]);
    has_up_biases |= has_bias(i);
  }
  const auto [dmiddle, dups, dup_biases, ddown] = feed_forward_gradients(
      dproduct, has_middle_norm(spec) ? norm_of_rows(kept.summed, layer.middle_norm(spec), workspace) : kept.summed,
      kept.pre, ups, weights[down], shared.activation, spec.gated, inner_dropout(spec, philox), true, true,
      has_up_biases, workspace);
  dweight[down] = ddown;
  for (size_t i = up; i < down; ++i) {
    dweight[i] = dups[i - up];
    if (has_up_biases) dbias[i] = dup_biases[i - up];
  }

  // The residual goes to what the attention's end gave: to its sum before the norm, or behind it.
  const Sum to_middle{dmiddle, spec.norm_first ? Array() : last.dresidual};
  const EndGradients middle =
      end_gradients(to_middle, spec.norm_first ? last.dresidual : OptionalArray(), kept.summed, kept.mean, kept.rstd,
                    layer.middle_norm(spec), philox_of(philox, kAttentionOutput), spec.attention_output_dropout,
                    has_end_bias(output, LayerSpec::kAttentionOutput), workspace);
  std::tie(dproduct, dbias[output]) =
      output_gradient(LayerSpec::kAttentionOutput, kept.attention_output, output, middle);
  const auto [dcontext, doutput, no_bias] =
      linear_gradients({dproduct}, flat(kept.context), {weights[output]}, dtype, true, true, false, workspace);
  dweight[output] = doutput[0];

  Heads dheads = make_heads(spec, kept.context.size(0), [&](const Shape& shape) { return workspace(shape, dtype); });
  const auto normed_again = [&](LayerSpec::NormOf which, const Array& t) {
    if (spec.bits_of(which) == 0) return t;
    return norm_of_rows(rows_of_heads(t), layer.norm(which), workspace).view(t.sizes());
  };
  const Array q = normed_again(LayerSpec::kQuery, heads.q), k = normed_again(LayerSpec::kKey, heads.k);
  const AttentionOptions options = attention_options(spec, shared.tables);
  const OptionalArray of_probabilities = philox_of(philox, kProbabilities);
  const Array dattention = dcontext.view(kept.context.sizes());
  if (spec.relative == 0) {
    attention_gradients(dattention, q, k, heads.v, kept.context, kept.softmax_stats, shared.cu_seqlens,
                        of_probabilities, options, spec.attention_dropout, dheads.q, dheads.k, dheads.v);
  } else {
    drelative = attention_relative_gradients(dattention, q, k, heads.v, kept.context, kept.softmax_stats,
                                             shared.cu_seqlens, of_probabilities, options, relative,
                                             spec.attention_dropout, dheads.q, dheads.k, dheads.v);
  }
  if (spec.bits_of(LayerSpec::kQuery) != 0 || spec.bits_of(LayerSpec::kKey) != 0) {
    const auto before_norm = [&](LayerSpec::NormOf which, const Array& dheads, const Array& heads,
                                 Kept::OfNorm of_norm) {
      if (spec.bits_of(which) == 0) return dheads;
      of_norm.summed = rows_of_heads(heads);
      return norm_gradient(which, rows_of_heads(dheads), of_norm, false).first.view(heads.sizes());
    };
    dheads = Heads(spec, {before_norm(LayerSpec::kQuery, dheads.q, heads.q, kept.query),
                          before_norm(LayerSpec::kKey, dheads.k, heads.k, kept.key), dheads.v});
  }
  std::vector<Array> projections;
  bool has_biases = false;
  for (size_t i = 0; i < spec.num_projections(); ++i) {
    projections.push_back(weights[i]);
    has_biases |= has_bias(i);
  }
  const Array x = input.rows();
  const Array projected = spec.begins_with_norm() ? norm_of_rows(x, layer.norm(LayerSpec::kAttention), workspace) : x;
  auto [dx, dprojections, dprojection_biases] =
      linear_gradients(dheads.flat, projected, projections, dtype, needs_dx || spec.begins_with_norm(), true,
                       has_biases, spec.begins_with_norm() ? workspace : make_dx);
  for (size_t i = 0; i < spec.num_projections(); ++i) {
    dweight[i] = dprojections[i];
    if (has_biases) dbias[i] = dprojection_biases[i];
  }

  EndGradients first;
  if (spec.begins_with_norm()) {
    first = end_gradients({dx, {}}, middle.dresidual, x, kept.first_mean, kept.first_rstd,
                          layer.norm(LayerSpec::kAttention), {}, 0.0, false, make_dx);
    dx = needs_dx ? first.dresidual : empty({0, x.size(1)}, x);
  }
  gradient_of_x = {dx, needs_dx && !spec.begins_with_norm() ? middle.dresidual : Array()};
  // Of the norms in the order of the layer's, not of the passes.
  const EndGradients &attention = spec.norm_first ? first : middle, &feed_forward = spec.norm_first ? middle : last;
  dnorms[0] = attention.dnorm;
  dnorms[1] = attention.dnorm_bias;
  dnorms[2] = feed_forward.dnorm;
  dnorms[3] = feed_forward.dnorm_bias;
  return gradients;
}

}  // namespace

std::vector<Array> encoder_layers_fwd_cpu(const Array& x, const Array& cu_seqlens, const List<Array>& weights,
                                          const List<Array>& biases, const List<Array>& norms,
                                          const OptionalArray& philox, const std::string& activation,
                                          const std::vector<int64_t>& layers, const std::vector<int64_t>& ints,
                                          const std::vector<double>& floats, const std::vector<Array>& rotary,
                                          const std::vector<int64_t>& rotary_layouts,
                                          const OptionalArray& window_positions, const OptionalArray& num_keys,
                                          const OptionalArray& relative_rows, const OptionalArray& relative_positions,
                                          const std::vector<Array>& relative, ScalarType dtype) {
  const Stack stack = stack_of(layers, ints, floats, weights.size());
  check(x.dim() == 2, "x has shape ", x.sizes(), ", expected (total_tokens, hidden_size)");
  const Shared shared{cu_seqlens, activation_of(activation), {rotary, rotary_layouts, window_positions, num_keys}};
  LayerReader reader({&weights, &biases, nullptr, nullptr, &norms, nullptr}, x.size(1), x.scalar_type(),
                     comparison_of_call());
  RelativeReader terms({relative_rows, relative_positions, relative});
  LayerOperands layer;
  Array hidden = contiguous(x);
  std::vector<Array> results{Array()};
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerSpec& spec = stack.specs[i];
    reader.read(spec, layer);
    if (i + 1 == layers.size()) {
      check(reader.norms_left() == 0, "there are ", reader.norms_left(), " tensors of norms too many");
    }
    if (i > 0 && stack.specs[i - 1].norm_first) results.push_back(hidden);
    Kept kept;
    const MakeArray make_out = i + 1 < layers.size() ? &workspace : static_cast<MakeArray>(&empty);
    hidden = layer_forward(hidden, spec, layer, philox_of_layer(philox, i, layers.size()), terms.read(spec), shared,
                           dtype, make_out, kept);
    for_each_kept(spec, kept, [&](const Array& array) { results.push_back(array); });
  }
  terms.finish();
  results[0] = hidden;
  return results;
}

std::vector<Array> encoder_layers_bwd_cpu(const Array& dout_, const Array& x_, const Array& cu_seqlens,
                                          const List<Array>& weights, const List<Array>& norms,
                                          const std::vector<Array>& kept_list, const OptionalArray& philox,
                                          const std::string& activation, const std::vector<int64_t>& layers,
                                          const std::vector<int64_t>& ints, const std::vector<double>& floats,
                                          const std::vector<Array>& rotary, const std::vector<int64_t>& rotary_layouts,
                                          const OptionalArray& window_positions, const OptionalArray& num_keys,
                                          const OptionalArray& relative_rows, const OptionalArray& relative_positions,
                                          const std::vector<Array>& relative, bool needs_dx) {
  const Stack stack = stack_of(layers, ints, floats, weights.size());
  const size_t count = layers.size();
  const Shared shared{cu_seqlens, activation_of(activation), {rotary, rotary_layouts, window_positions, num_keys}};
  LayerReader reader({&weights, nullptr, nullptr, nullptr, &norms, nullptr}, x_.size(1), x_.scalar_type(),
                     comparison_of_call());

  std::vector<Input> inputs(count);
  std::vector<Kept> kept(count);
  std::vector<RelativeInputs> relatives(count);
  RelativeReader terms({relative_rows, relative_positions, relative});
  std::vector<LayerOperands> operands(count);  // of which only the norms are read
  size_t taken = 0;
  const auto take = [&](Array& array) {
    check(taken < kept_list.size(), "forward keeps more than ", kept_list.size(), " tensors");
    array = kept_list[taken++];
  };
  for (size_t i = 0; i < count; ++i) {
    const LayerSpec& spec = stack.specs[i];
    if (i == 0) {
      inputs[0].kept = contiguous(x_);
    } else if (stack.specs[i - 1].norm_first) {
      take(inputs[i].kept);
    } else {
      inputs[i] = {kept[i - 1].last_summed, operands[i - 1].norm(LayerSpec::kFeedForward)};
    }
    for_each_kept(spec, kept[i], take);
    reader.read_norms(spec, operands[i]);
    relatives[i] = terms.read(spec);
  }
  terms.finish();
  check(taken == kept_list.size(), "forward keeps ", taken, " tensors, got ", kept_list.size());
  for (size_t i = 0; i < count; ++i) {
    const LayerSpec& spec = stack.specs[i];
    const Shape sizes = inputs[i].kept.sizes();
    check(sizes == x_.sizes(), "a layer's input has shape ", sizes, ", expected ", x_.sizes());
    for (size_t j = 0; j < spec.num_projections(); ++j) {
      const Array& projected = kept[i].projected[j];
      check_tensor("a projection", projected, {x_.size(0), spec.heads_of(j), spec.head_dim}, projected.scalar_type(),
                   cpu());
    }
  }

  std::vector<LayerGradients> gradients(count);
  Sum dout{contiguous(dout_), {}};
  for (size_t i = count; i-- > 0;) {
    const MakeArray make_dx = i > 0 ? &workspace : static_cast<MakeArray>(&empty);
    gradients[i] = layer_backward(dout, inputs[i], kept[i], stack.specs[i], operands[i], weights, stack.first_weight[i],
                                  philox_of_layer(philox, i, count), relatives[i], shared, i > 0 || needs_dx, make_dx);
    kept[i] = Kept();
    dout = std::exchange(gradients[i].dx, Sum());  // its memory serves the layers below
  }

  std::vector<Array> results{dout.added()};
  for (size_t i = 0; i < count; ++i) {
    const auto& all = gradients[i].dweight;
    results.insert(results.end(), all.begin(), all.begin() + static_cast<int64_t>(stack.specs[i].num_leaves()));
  }
  for (size_t i = 0; i < count; ++i) {
    for (size_t j = 0; j < gradients[i].dnorms.size(); ++j) {
      if ((stack.specs[i].norms >> j & 1) != 0) results.push_back(gradients[i].dnorms[j]);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    for (size_t j = 0; j < stack.specs[i].num_leaves(); ++j) {
      if ((stack.specs[i].biases >> j & 1) != 0) results.push_back(gradients[i].dbias[j]);
    }
  }
  for (const LayerGradients& of_layer : gradients) {
    const RelativeGradients& of_terms = of_layer.drelative;
    for (const Array& gradient : {of_terms.key, of_terms.query, of_terms.bias}) {
      if (gradient.defined() && gradient.dim() > 1) results.push_back(gradient);
    }
  }
  return results;
}

}  // namespace fastbert
