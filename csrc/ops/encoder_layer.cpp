#include "encoder_layer.h"

#include "../cpu/add.h"
#include "attention.h"
#include "dropout.h"
#include "layer_form.h"
#include "tensors.h"
#include "workspace.h"

namespace fastbert {
namespace {

// What forward keeps for backward.
struct Kept {
  Array first, first_mean, first_rstd;  // the norm that a pre-norm layer begins with
  std::vector<Array> projected;
  Array context, softmax_stats;
  Array summed, mean, rstd, middle;  // the attention's end
  Array pre;
  Array last_summed, last_mean, last_rstd;  // the norm that a post-norm layer ends with
};

// Visits those that there are, in the order of the list that forward returns after its output.
template <typename Visit>
void for_each_kept(const LayerForm& form, Kept& kept, const Visit& visit) {
  const auto visit_all = [&](std::initializer_list<Array*> arrays) {
    for (Array* array : arrays) visit(*array);
  };
  kept.projected.resize(form.num_projections());
  if (form.begins_with_norm()) visit_all({&kept.first, &kept.first_mean, &kept.first_rstd});
  for (Array& array : kept.projected) visit(array);
  visit_all({&kept.context, &kept.softmax_stats, &kept.summed});
  if (form.norm_first || form.has_attention_norm()) visit_all({&kept.middle, &kept.mean, &kept.rstd});
  visit(kept.pre);
  if (!form.norm_first) visit_all({&kept.last_summed, &kept.last_mean, &kept.last_rstd});
}

// The layer's dropouts, in the order of its form's, of which the inner one has a seed only where it is on.
enum DropoutOf : size_t { kProbabilities, kAttentionOutput, kInner, kOutput };

OptionalArray philox_of(const OptionalArray& philox, DropoutOf which) {
  if (!philox.defined()) return {};
  check(philox.dim() == 2 && (philox.size(0) == 3 || philox.size(0) == 4), "philox has shape ", philox.sizes(),
        ", expected (3, 2) or (4, 2)");
  return philox.select(0, which == kOutput ? philox.size(0) - 1 : which);
}

Dropout inner_dropout(const LayerForm& form, const OptionalArray& philox) {
  const double p = form.dropouts[kInner];
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

// The end of a half: dropout(product + bias) + residual, and the norm of that, if there is one.
struct End {
  Array out, summed, mean, rstd;
};

End end_half(const Array& product, const Array& bias, const Array& residual, const NormOperand& norm,
             const OptionalArray& philox, double dropout_p) {
  if (!norm.weight.defined()) {
    const Array sum = add_dropped(product, bias, residual, philox, dropout_p);
    return {sum, sum, {}, {}};
  }
  const auto [out, summed, mean, rstd] = add_layer_norm_fwd_cpu(product, bias, residual, norm.weight, norm.bias, philox,
                                                                dropout_p, norm.eps, true, true, norm.rms);
  return {out, summed, mean, rstd};
}

struct EndGradients {
  Array dproduct, dresidual, dbias, dnorm, dnorm_bias;
};

// dsum, which may be undefined, is what the sum's gradient has from elsewhere; only with a norm.
EndGradients end_gradients(const Array& dout, const OptionalArray& dsum, const Array& summed, const Array& mean,
                           const Array& rstd, const NormOperand& norm, const OptionalArray& philox, double dropout_p,
                           bool has_bias) {
  if (!norm.weight.defined()) {
    const Array dproduct = dropout_p > 0.0 ? dropout_cpu(dout, philox, dropout_p) : dout;
    return {dproduct, dout, has_bias ? bias_gradient(dproduct, dout.scalar_type()) : Array(), {}, {}};
  }
  const auto [dproduct, dsummed, dbias, dnorm, dnorm_bias] =
      add_layer_norm_bwd_cpu(dout, dsum, summed, mean, rstd, norm.weight, philox, dropout_p, has_bias, norm.rms);
  // Without dropout a sum's gradient is its product's.
  return {dropout_p > 0.0 ? dproduct : dsummed, dsummed, dbias, dnorm, dnorm_bias};
}

LayerForm form_of(const std::vector<int64_t>& ints, const std::vector<double>& numbers, const List<Array>& weights) {
  const std::vector<LayerForm> forms = layer_forms(ints, numbers);
  check(forms.size() == 1, "got the forms of ", forms.size(), " layers, expected one");
  check(weights.size() == forms[0].num_leaves(), "got ", weights.size(), " weights, expected ", forms[0].num_leaves(),
        " weights");
  check(forms[0].scales == 0, "int8 weights have no gradients");
  return forms[0];
}

Array flat(const Array& heads) { return heads.view({heads.size(0), heads.size(1) * heads.size(2)}); }

}  // namespace

std::vector<Array> encoder_layer_fwd_cpu(const Array& x_, const Array& cu_seqlens, const List<Array>& weights,
                                         const List<Array>& biases, const List<Array>& norms,
                                         const OptionalArray& philox, const std::string& activation,
                                         const std::vector<int64_t>& ints, const std::vector<double>& numbers,
                                         const std::vector<Array>& rotary, const std::vector<int64_t>& rotary_layouts,
                                         const OptionalArray& window_positions, ScalarType dtype) {
  const LayerForm form = form_of(ints, numbers, weights);
  check(x_.dim() == 2, "x has shape ", x_.sizes(), ", expected (total_tokens, hidden_size)");
  const Array x = contiguous(x_);
  const LayerLists lists{&weights, &biases, nullptr, nullptr, &norms, nullptr};
  LayerReader reader(lists, x.size(1), x.scalar_type());
  LayerOperands layer;
  reader.read(form, layer);
  check(reader.norms_left() == 0, "there are ", reader.norms_left(), " tensors of norms too many");
  const size_t output = form.attention_output(), up = form.first_up(), down = form.down();

  Kept kept;
  if (form.begins_with_norm()) {
    const NormOperand& norm = layer.attention_norm;
    std::tie(kept.first, std::ignore, kept.first_mean, kept.first_rstd) =
        add_layer_norm_fwd_cpu(x, {}, {}, norm.weight, norm.bias, {}, 0.0, norm.eps, false, true, norm.rms);
  }
  const Heads heads = make_heads(form, x.size(0), [&](const Shape& shape) { return empty(shape, dtype); });
  linear_rows(form.begins_with_norm() ? kept.first : x, layer.projections(form), heads.flat, dtype, nullptr);
  kept.projected = heads.whole;
  std::tie(kept.context, kept.softmax_stats) = attention_fwd_cpu(
      heads.q, heads.k, heads.v, cu_seqlens, philox_of(philox, kProbabilities),
      attention_form(form, {rotary, rotary_layouts, window_positions}), form.dropouts[kProbabilities], true);

  // The sums of residual and product are in x's dtype: where that is wider, the product is not rounded on its way.
  const Array product = workspace(x.sizes(), x.scalar_type());
  linear_rows(flat(kept.context), {layer.without_bias(output)}, {product}, dtype, nullptr);
  const End middle = end_half(product, layer.bias[output], x, layer.middle_norm(form),
                              philox_of(philox, kAttentionOutput), form.dropouts[kAttentionOutput]);
  std::tie(kept.middle, kept.summed, kept.mean, kept.rstd) =
      std::tie(middle.out, middle.summed, middle.mean, middle.rstd);

  const FeedForwardOperand feed_forward =
      layer.feed_forward(form, activation_of(activation), inner_dropout(form, philox));
  kept.pre = empty({x.size(0), static_cast<int64_t>(form.num_ups()) * layer.weight[up].size(0)}, dtype);
  feed_forward_rows(middle.out, feed_forward, product, kept.pre, dtype, nullptr);
  const End last = end_half(product, layer.bias[down], form.norm_first ? middle.summed : middle.out,
                            form.norm_first ? NormOperand() : layer.feed_forward_norm, philox_of(philox, kOutput),
                            form.dropouts[kOutput]);
  std::tie(kept.last_summed, kept.last_mean, kept.last_rstd) = std::tie(last.summed, last.mean, last.rstd);

  std::vector<Array> results{last.out};
  for_each_kept(form, kept, [&](const Array& array) { results.push_back(array); });
  return results;
}

std::vector<Array> encoder_layer_bwd_cpu(const Array& dout_, const Array& x_, const Array& cu_seqlens,
                                         const List<Array>& weights, const List<Array>& norms,
                                         const std::vector<Array>& kept_list, const OptionalArray& philox,
                                         const std::string& activation, const std::vector<int64_t>& ints,
                                         const std::vector<double>& numbers, const std::vector<Array>& rotary,
                                         const std::vector<int64_t>& rotary_layouts,
                                         const OptionalArray& window_positions, bool needs_dx) {
  const LayerForm form = form_of(ints, numbers, weights);
  const Array x = contiguous(x_), dout = contiguous(dout_);
  Kept kept;
  size_t taken = 0;
  for_each_kept(form, kept, [&](Array& array) {
    check(taken < kept_list.size(), "forward keeps more than ", kept_list.size(), " tensors");
    array = kept_list[taken++];
  });
  check(taken == kept_list.size(), "forward keeps ", taken, " tensors, got ", kept_list.size());
  for (size_t i = 0; i < form.num_projections(); ++i) {
    const Array& projected = kept.projected[i];
    check_tensor("a projection", projected, {x.size(0), form.heads_of(i), form.head_dim}, projected.scalar_type(),
                 cpu());
  }
  const LayerLists lists{&weights, nullptr, nullptr, nullptr, &norms, nullptr};
  LayerReader reader(lists, x.size(1), x.scalar_type());
  LayerOperands layer;
  reader.read_norms(form, layer);
  const size_t output = form.attention_output(), up = form.first_up(), down = form.down();
  const Heads heads(form, kept.projected);
  const auto dtype = kept.context.scalar_type();
  const auto has_bias = [&](size_t i) { return (form.biases >> i & 1) != 0; };
  std::array<Array, LayerOperands::kMostLeaves> dweight, dbias;

  const EndGradients last = end_gradients(dout, {}, kept.last_summed, kept.last_mean, kept.last_rstd,
                                          form.norm_first ? NormOperand() : layer.feed_forward_norm,
                                          philox_of(philox, kOutput), form.dropouts[kOutput], has_bias(down));
  dbias[down] = last.dbias;
  std::vector<Array> ups;
  bool has_up_biases = false;
  for (size_t i = up; i < down; ++i) {
    ups.push_back(weights[i]);
    has_up_biases |= has_bias(i);
  }
  const auto [dmiddle, dups, dup_biases, ddown] = feed_forward_gradients(
      last.dproduct, kept.middle.defined() ? kept.middle : kept.summed, kept.pre, ups, weights[down],
      activation_of(activation), form.gated, inner_dropout(form, philox), true, true, has_up_biases);
  dweight[down] = ddown;
  for (size_t i = up; i < down; ++i) {
    dweight[i] = dups[i - up];
    if (has_up_biases) dbias[i] = dup_biases[i - up];
  }

  // The residual goes to what the attention's end gave: to its sum before the norm, or behind it.
  if (!form.norm_first) add_to(dmiddle, last.dresidual);
  const EndGradients middle = end_gradients(
      dmiddle, form.norm_first ? last.dresidual : OptionalArray(), kept.summed, kept.mean, kept.rstd,
      layer.middle_norm(form), philox_of(philox, kAttentionOutput), form.dropouts[kAttentionOutput], has_bias(output));
  dbias[output] = middle.dbias;
  const auto [dcontext, doutput, no_bias] =
      linear_gradients({middle.dproduct}, flat(kept.context), {weights[output]}, dtype, true, true, false);
  dweight[output] = doutput[0];

  const Heads dheads = make_heads(form, x.size(0), [&](const Shape& shape) { return workspace(shape, dtype); });
  attention_gradients(dcontext.view(kept.context.sizes()), heads.q, heads.k, heads.v, kept.context, kept.softmax_stats,
                      cu_seqlens, philox_of(philox, kProbabilities),
                      attention_form(form, {rotary, rotary_layouts, window_positions}), form.dropouts[kProbabilities],
                      dheads.q, dheads.k, dheads.v);
  std::vector<Array> projections;
  bool has_biases = false;
  for (size_t i = 0; i < form.num_projections(); ++i) {
    projections.push_back(weights[i]);
    has_biases |= has_bias(i);
  }
  auto [dx, dprojections, dprojection_biases] =
      linear_gradients(dheads.flat, form.begins_with_norm() ? kept.first : x, projections, dtype,
                       needs_dx || form.begins_with_norm(), true, has_biases);
  for (size_t i = 0; i < form.num_projections(); ++i) {
    dweight[i] = dprojections[i];
    if (has_biases) dbias[i] = dprojection_biases[i];
  }

  EndGradients first;
  if (form.begins_with_norm()) {
    first =
        end_gradients(dx, middle.dresidual, x, kept.first_mean, kept.first_rstd, layer.attention_norm, {}, 0.0, false);
    dx = needs_dx ? first.dresidual : empty({0, x.size(1)}, x);
  } else if (needs_dx) {
    add_to(dx, middle.dresidual);
  }

  std::vector<Array> results{dx};
  results.insert(results.end(), dweight.begin(), dweight.begin() + static_cast<int64_t>(form.num_leaves()));
  // Of the norms in the order of the layer's, not of the passes.
  const EndGradients &attention = form.norm_first ? first : middle, &feed_forward = form.norm_first ? middle : last;
  const std::array<const Array*, 4> dnorms{&attention.dnorm, &attention.dnorm_bias, &feed_forward.dnorm,
                                           &feed_forward.dnorm_bias};
  for (size_t i = 0; i < 4; ++i) {
    if ((form.norms >> i & 1) != 0) results.push_back(*dnorms[i]);
  }
  for (size_t i = 0; i < form.num_leaves(); ++i) {
    if (has_bias(i)) results.push_back(dbias[i]);
  }
  return results;
}

}  // namespace fastbert
