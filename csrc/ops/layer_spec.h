// What a layer computes, and what it runs on: what fastbert/ops/layers/encoder_layers.py makes lists of.
#pragma once

#include <array>
#include <vector>

#include "activation.h"
#include "attention.h"
#include "attention_relative.h"
#include "feed_forward.h"
#include "layer_norm.h"
#include "layer_numbers.h"
#include "register.h"

namespace fastbert {

// The numbers of a layer, and what follows from them.
struct LayerSpec : LayerNumbers {
  explicit LayerSpec(const LayerNumbers& numbers) : LayerNumbers(numbers) {}

  // Leaves, in this order: those that attention's heads come from, its output, those up, down.
  size_t num_projections() const { return merged_qkv ? 1 : 3; }
  size_t attention_output() const { return num_projections(); }
  size_t first_up() const { return num_projections() + 1; }
  size_t num_ups() const { return gated && !merged_gate ? 2 : 1; }
  size_t down() const { return first_up() + num_ups(); }
  size_t num_leaves() const { return down() + 1; }

  // By the order of fastbert/layer_spec.py's NORMS.
  enum NormOf : size_t { kAttention, kFeedForward, kQuery, kKey, kAttentionOutput, kFeedForwardOutput, kNorms };
  int64_t bits_of(NormOf which) const { return norms >> 2 * which & 3; }
  Norm type_of(NormOf which) const { return static_cast<Norm>(which == kQuery || which == kKey ? head_norm : norm); }
  double eps_of(NormOf which) const {
    const double eps[] = {attention_norm_eps, feed_forward_norm_eps,     query_norm_eps,
                          key_norm_eps,       attention_output_norm_eps, feed_forward_output_norm_eps};
    return eps[which];
  }
  bool has_attention_norm() const { return (norms & 1) != 0; }
  bool begins_with_norm() const { return norm_first && has_attention_norm(); }
  int64_t heads_of(size_t projection) const {
    return merged_qkv ? num_heads + 2 * num_kv_heads : projection == 0 ? num_heads : num_kv_heads;
  }
};

// What the layers of a call share, beside cu_seqlens: see fastbert/ops/layers/encoder_layers.py.
struct AttentionTables {
  const std::vector<Array>& rotary;
  const std::vector<int64_t>& rotary_layouts;
  const OptionalArray &window_positions, &num_keys;
};

AttentionOptions attention_options(const LayerSpec& spec, const AttentionTables& tables);

// What the layers of a call have of relative terms, as an operator takes it: rows and positions are shared, and `terms`
// has of each layer those that its numbers say.
struct RelativeLists {
  const OptionalArray &rows, &positions;
  const std::vector<Array>& terms;
};

// Takes them apart, layer by layer.
class RelativeReader {
 public:
  explicit RelativeReader(const RelativeLists& lists) : lists_(lists) {}

  // The next layer's. Rows are undefined where it has no such term.
  RelativeInputs read(const LayerSpec& spec);
  // Fails if any are left.
  void finish() const;

 private:
  RelativeLists lists_;
  size_t next_ = 0;
};

std::vector<LayerSpec> layer_specs(const std::vector<int64_t>& ints, const std::vector<double>& floats);

// The operands of one layer. Those before it are not needed any more when the next is read.
struct LayerOperands {
  static constexpr size_t kMostLeaves = 7;
  std::array<Array, kMostLeaves> weight, bias, scale, input_scale;
  std::array<int64_t, kMostLeaves> version;
  Comparison comparison;
  std::array<NormOperand, LayerSpec::kNorms> norms;

  const NormOperand& norm(LayerSpec::NormOf which) const { return norms[which]; }
  // What stands behind the attention's residual.
  const NormOperand& middle_norm(const LayerSpec& spec) const {
    return norm(spec.norm_first ? LayerSpec::kFeedForward : LayerSpec::kAttention);
  }
  LinearOperand linear(size_t i) const {
    return {weight[i], &bias[i], &scale[i], &input_scale[i], version[i], comparison};
  }
  // For what adds the bias itself.
  LinearOperand without_bias(size_t i) const {
    return {weight[i], nullptr, &scale[i], &input_scale[i], version[i], comparison};
  }
  std::vector<LinearOperand> projections(const LayerSpec& spec) const;
  FeedForwardOperand feed_forward(const LayerSpec& spec, Activation activation, const Dropout& dropout) const;
};

// What the projections give, or its gradients.
struct Heads {
  std::vector<Array> whole;  // of each projection, (total_tokens, heads, head_dim)
  std::vector<Array> flat;   // the same, (total_tokens, heads * head_dim)
  Array q, k, v;             // parts of them

  Heads() = default;
  Heads(const LayerSpec& spec, std::vector<Array> whole);
};

// What norms rows [begin, end) of queries' and keys' heads in place, where the layer does that; else null. The tensors
// must outlive it.
RowsDone norm_heads_rows(const LayerSpec& spec, const LayerOperands& layer, const Heads& heads);

// In memory that make(shape) gives.
template <typename Make>
Heads make_heads(const LayerSpec& spec, int64_t tokens, const Make& make) {
  std::vector<Array> whole;
  whole.reserve(spec.num_projections());
  for (size_t i = 0; i < spec.num_projections(); ++i) whole.push_back(make({tokens, spec.heads_of(i), spec.head_dim}));
  return {spec, std::move(whole)};
}

// A stack's operands as an operator takes them; null where its schema has none. versions: the weights', or none.
struct LayerLists {
  const List<Array>*weights, *biases, *scales, *input_scales, *norms;
  const std::vector<int64_t>* versions;
};

// Takes them apart, layer by layer.
class LayerReader {
 public:
  LayerReader(const LayerLists& lists, int64_t hidden_size, ScalarType dtype, Comparison comparison);

  // The next layer's, with those shapes checked that no product checks.
  void read(const LayerSpec& spec, LayerOperands& layer);
  void read_norms(const LayerSpec& spec, LayerOperands& layer);
  // The norm whose tensors come next in the list, by the bits of those that are there; they stay the next.
  NormOperand norm_ahead(Norm type, int64_t bits, double eps, int64_t width) const;
  NormOperand final_norm_ahead(const LayerSpec& last, int64_t bits, double eps) const;
  // The one that a layer of this spec, the next to be read, begins with: undefined where it does not.
  NormOperand norm_ahead(const LayerSpec& spec) const;
  // How many tensors of norms are left; fails if anything else is.
  size_t norms_left() const;

 private:
  Array vector(const char* name, const Array& t, int64_t width) const;

  bool has_versions() const { return lists_.versions != nullptr && !lists_.versions->empty(); }

  LayerLists lists_;
  int64_t hidden_size_;
  ScalarType dtype_;
  Comparison comparison_;
  size_t layer_ = 0, weight_ = 0, bias_ = 0, scale_ = 0, input_scale_ = 0, norm_ = 0;  // the next ones
};

}  // namespace fastbert
