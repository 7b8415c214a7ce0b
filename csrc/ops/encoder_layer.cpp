#include "encoder_layer.h"

#include <cmath>

#include "../cpu/add.h"
#include "activation.h"
#include "attention.h"
#include "layer_norm.h"
#include "linear.h"
#include "packed_weights.h"
#include "tensors.h"
#include "workspace.h"

namespace fastbert {
namespace {

// What forward keeps for backward, in the order of the list that it returns after its output.
enum Kept : size_t { kQ, kK, kV, kContext, kStats, kSummed, kMean, kRstd, kMiddle, kPre, kSummed2, kMean2, kRstd2 };
constexpr size_t kNumKept = 13;

// Seed and offset of the layer's dropout number i: attention's, its output's, the feed-forward's.
OptionalArray philox_of(const OptionalArray& philox, int64_t i) {
  if (!philox.defined()) return {};
  check(philox.dim() == 2 && philox.size(0) == 3, "philox has shape ", philox.sizes(), ", expected (3, 2)");
  return philox.select(0, i);
}

double softmax_scale_of(const Array& q) { return 1.0 / std::sqrt(static_cast<double>(q.size(2))); }

// sum += x, of one shape and dtype, without gaps.
void add_to(const Array& sum, const Array& x) {
  for_dtype(sum.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    parallel_for(0, sum.numel(), 32768,
                 [&](int64_t begin, int64_t end) { fastbert::add_to(sum.data<T>(), x.data<const T>(), begin, end); });
  });
}

void check_counts(const std::vector<Array>& weights, const std::vector<Array>& norms,
                  const std::vector<double>& dropouts) {
  check(weights.size() == 6 && norms.size() == 4 && dropouts.size() == 3,
        "expected 6 weights, 4 norms and 3 dropouts, got ", weights.size(), ", ", norms.size(), " and ",
        dropouts.size());
}

}  // namespace

std::vector<Array> encoder_layer_fwd_cpu(const Array& x_, const Array& cu_seqlens, const std::vector<Array>& weights,
                                         const std::vector<Array>& biases, const std::vector<Array>& norms,
                                         const OptionalArray& philox, const std::vector<double>& dropouts,
                                         const std::vector<double>& eps, int64_t num_heads,
                                         const std::string& activation, ScalarType dtype) {
  check_counts(weights, norms, dropouts);
  check(biases.size() == 6 && eps.size() == 2, "expected 6 biases and 2 eps, got ", biases.size(), " and ", eps.size());
  check(x_.dim() == 2 && num_heads > 0 && weights[0].size(0) % num_heads == 0, "num_heads is ", num_heads,
        ", the query has ", weights[0].size(0), " features");
  const Array x = contiguous(x_);
  const int64_t tokens = x.size(0), width = weights[0].size(0), head_dim = width / num_heads;
  const auto linear = [&](size_t i) -> LinearOperand {
    return {weights[i], &biases[i], nullptr, 0.0, version_of(weights[i])};
  };
  const auto without_bias = [&](size_t i) -> LinearOperand {
    return {weights[i], nullptr, nullptr, 0.0, version_of(weights[i])};
  };

  std::vector<Array> qkv, flat;
  for (size_t i = 0; i < 3; ++i) {
    check(weights[i].size(0) == width, "query, key and value differ in their features");
    qkv.push_back(empty({tokens, num_heads, head_dim}, dtype));
    flat.push_back(qkv.back().view({tokens, width}));
  }
  linear_rows(x, {linear(0), linear(1), linear(2)}, flat, dtype, nullptr);
  const auto [context, stats] = attention_fwd_cpu(qkv[0], qkv[1], qkv[2], cu_seqlens, philox_of(philox, 0),
                                                  softmax_scale_of(qkv[0]), dropouts[0], true);
  // The sums of residual and product are in x's dtype: where that is wider, the product is not rounded on its way.
  const Array product = workspace(x.sizes(), x.scalar_type());
  linear_rows(context.view({tokens, width}), {without_bias(3)}, {product}, dtype, nullptr);
  const auto [middle, summed, mean, rstd] = add_layer_norm_fwd_cpu(
      product, biases[3], x, norms[0], norms[1], philox_of(philox, 1), dropouts[1], eps[0], true, true);
  const Array pre = empty({tokens, weights[4].size(0)}, dtype);
  feed_forward_rows(middle, {{linear(4)}, without_bias(5), activation_of(activation)}, product, pre, dtype, nullptr);
  const auto [out, summed2, mean2, rstd2] = add_layer_norm_fwd_cpu(
      product, biases[5], middle, norms[2], norms[3], philox_of(philox, 2), dropouts[2], eps[1], true, true);
  return {out, qkv[0], qkv[1], qkv[2], context, stats, summed, mean, rstd, middle, pre, summed2, mean2, rstd2};
}

std::vector<Array> encoder_layer_bwd_cpu(const Array& dout, const Array& x_, const Array& cu_seqlens,
                                         const std::vector<Array>& weights, const std::vector<Array>& norms,
                                         const std::vector<Array>& kept, const OptionalArray& philox,
                                         const std::vector<double>& dropouts, const std::string& activation,
                                         bool needs_dx) {
  check_counts(weights, norms, dropouts);
  check(kept.size() == kNumKept, "expected ", kNumKept, " tensors kept by forward, got ", kept.size());
  const Array x = contiguous(x_);
  const auto dtype = kept[kQ].scalar_type();
  const int64_t tokens = x.size(0), width = weights[0].size(0);

  const auto [dproduct2, dsummed2, ddown_bias, dnorm2, dnorm2_bias] = add_layer_norm_bwd_cpu(
      dout, {}, kept[kSummed2], kept[kMean2], kept[kRstd2], norms[2], philox_of(philox, 2), dropouts[2], true);
  // Without dropout a sum's gradient is its product's.
  const auto [dmiddle, dup, dup_bias, ddown] =
      feed_forward_gradients(dropouts[2] > 0.0 ? dproduct2 : dsummed2, kept[kMiddle], kept[kPre], {weights[4]},
                             weights[5], activation_of(activation), false, {0.0, 0, 0}, true, true, true);
  add_to(dmiddle, dsummed2);

  const auto [dproduct, dsummed, doutput_bias, dnorm, dnorm_bias] = add_layer_norm_bwd_cpu(
      dmiddle, {}, kept[kSummed], kept[kMean], kept[kRstd], norms[0], philox_of(philox, 1), dropouts[1], true);
  const auto [dcontext, doutput, no_bias] =
      linear_gradients({dropouts[1] > 0.0 ? dproduct : dsummed}, kept[kContext].view({tokens, width}), {weights[3]},
                       dtype, true, true, false);
  const auto [dq, dk, dv] =
      attention_bwd_cpu(dcontext.view(kept[kQ].sizes()), kept[kQ], kept[kK], kept[kV], kept[kContext], kept[kStats],
                        cu_seqlens, philox_of(philox, 0), softmax_scale_of(kept[kQ]), dropouts[0]);
  const auto flat = [&](const Array& t) { return t.view({tokens, width}); };
  const auto [dx, dqkv, dqkv_biases] = linear_gradients(
      {flat(dq), flat(dk), flat(dv)}, x, {weights[0], weights[1], weights[2]}, dtype, needs_dx, true, true);
  if (needs_dx) add_to(dx, dsummed);
  return {dx,         dqkv[0],        dqkv[1],        dqkv[2],        doutput[0],   dup[0],
          ddown,      dqkv_biases[0], dqkv_biases[1], dqkv_biases[2], doutput_bias, dup_bias[0],
          ddown_bias, dnorm,          dnorm_bias,     dnorm2,         dnorm2_bias};
}

}  // namespace fastbert
