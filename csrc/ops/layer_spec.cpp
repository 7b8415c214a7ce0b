#include "layer_spec.h"

#include <algorithm>

#include "packed_weights.h"
#include "tensors.h"

namespace fastbert {
namespace {

// A list's next element.
template <typename Tensors>
Array next(const char* name, const Tensors* list, size_t& at) {
  const size_t size = list == nullptr ? 0 : list->size();
  check(at < size, "there are ", size, " ", name, ", the layers have more");
  return (*list)[at++];
}

bool has_bit(int64_t bits, size_t i) { return (bits >> i & 1) != 0; }
size_t norms_of(int64_t bits) { return has_bit(bits, 0) + has_bit(bits, 1); }

}  // namespace

AttentionOptions attention_options(const LayerSpec& spec, const AttentionTables& tables) {
  AttentionOptions attention{spec.softmax_scale, spec.window_left, spec.window_right};
  if (spec.window_left >= 0 || spec.window_right >= 0) attention.window_positions = tables.window_positions;
  attention.num_keys = tables.num_keys;
  if (spec.rotary < 0) return attention;
  const auto i = static_cast<size_t>(spec.rotary), count = tables.rotary_layouts.size();
  check(i < count && tables.rotary.size() == 2 * count, "a layer takes rotary table ", i, ", the call has ", count);
  attention.cos = tables.rotary[2 * i];
  attention.sin = tables.rotary[2 * i + 1];
  attention.interleaved = (tables.rotary_layouts[i] & 1) != 0;
  attention.by_token = (tables.rotary_layouts[i] & 2) != 0;
  return attention;
}

RelativeInputs RelativeReader::read(const LayerSpec& spec) {
  if (spec.relative == 0) return {};
  check(lists_.rows.defined(), "a layer has relative terms, and the call has no relative_rows");
  const auto term = [&](size_t bit) {
    return has_bit(spec.relative, bit) ? next("relative terms", &lists_.terms, next_) : Array();
  };
  const Array key = term(0), query = term(1), bias = term(2);
  return {lists_.rows, key, query, bias, lists_.positions};
}

void RelativeReader::finish() const {
  check(next_ == lists_.terms.size(), "there are ", lists_.terms.size(), " relative terms, too many for the layers");
}

std::vector<LayerSpec> layer_specs(const std::vector<int64_t>& ints, const std::vector<double>& floats) {
  constexpr size_t kInts = LayerNumbers::kInts, kFloats = LayerNumbers::kFloats;
  const size_t count = ints.size() / kInts;
  check(count > 0 && ints.size() == count * kInts && floats.size() == count * kFloats, "a layer's numbers are ", kInts,
        " whole ones and ", kFloats, " others, got ", ints.size(), " and ", floats.size());
  std::vector<LayerSpec> specs;
  specs.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const LayerSpec& spec = specs.emplace_back(LayerNumbers::read(&ints[i * kInts], &floats[i * kFloats]));
    check(spec.num_heads > 0 && spec.num_kv_heads > 0 && spec.num_heads % spec.num_kv_heads == 0, "num_heads is ",
          spec.num_heads, ", num_kv_heads ", spec.num_kv_heads);
    check(spec.head_dim > 0, "head_dim is ", spec.head_dim);
  }
  return specs;
}

std::vector<LinearOperand> LayerOperands::projections(const LayerSpec& spec) const {
  std::vector<LinearOperand> all;
  all.reserve(spec.num_projections());
  for (size_t i = 0; i < spec.num_projections(); ++i) all.push_back(linear(i));
  return all;
}

FeedForwardOperand LayerOperands::feed_forward(const LayerSpec& spec, Activation activation,
                                               const Dropout& dropout) const {
  std::vector<LinearOperand> ups;
  ups.reserve(spec.num_ups());
  for (size_t i = spec.first_up(); i < spec.down(); ++i) ups.push_back(linear(i));
  return {std::move(ups), without_bias(spec.down()), activation, spec.gated, dropout};
}

Heads::Heads(const LayerSpec& spec, std::vector<Array> whole_) : whole(std::move(whole_)) {
  flat.reserve(whole.size());
  for (const Array& t : whole) flat.push_back(t.view({t.size(0), t.size(1) * t.size(2)}));
  if (spec.merged_qkv) {
    q = whole[0].narrow(1, 0, spec.num_heads);
    k = whole[0].narrow(1, spec.num_heads, spec.num_kv_heads);
    v = whole[0].narrow(1, spec.num_heads + spec.num_kv_heads, spec.num_kv_heads);
  } else {
    q = whole[0];
    k = whole[1];
    v = whole[2];
  }
}

LayerReader::LayerReader(const LayerLists& lists, int64_t hidden_size, ScalarType dtype, Comparison comparison)
    : lists_(lists), hidden_size_(hidden_size), dtype_(dtype), comparison_(comparison) {
  check(!has_versions() || lists.versions->size() == lists.weights->size(), "the versions are not as many as the ",
        lists.weights->size(), " weights");
  check(lists.scales == nullptr || lists.input_scales->size() == lists.scales->size(),
        "input_scales are not as many as weight_scales");
}

// What norms take: their weights and biases, and the biases of the products before them.
Array LayerReader::vector(const char* name, const Array& t, int64_t width) const {
  check_tensor(name, t, {width}, dtype_, cpu());
  return contiguous(t);
}

void LayerReader::read(const LayerSpec& spec, LayerOperands& layer) {
  layer.comparison = comparison_;
  for (size_t i = 0; i < spec.num_leaves(); ++i) {
    const bool has_bias = has_bit(spec.biases, i), has_scale = has_bit(spec.scales, i);
    const size_t at = weight_;
    layer.weight[i] = next("weights", lists_.weights, weight_);
    const Array& weight = layer.weight[i];
    layer.version[i] = has_versions() ? (*lists_.versions)[at] : version_of(weight);
    layer.bias[i] = has_bias ? next("biases", lists_.biases, bias_) : Array();
    layer.scale[i] = has_scale ? next("weight_scales", lists_.scales, scale_) : Array();
    layer.input_scale[i] = has_scale ? next("input_scales", lists_.input_scales, input_scale_) : Array();
    const bool is_output = i == spec.attention_output() || i == spec.down();
    const int64_t features = i < spec.num_projections() ? spec.heads_of(i) * spec.head_dim
                             : is_output                ? hidden_size_
                                                        : weight.size(0);
    check(weight.dim() == 2 && weight.size(0) == features, "weight ", i, " of layer ", layer_, " is ", weight.sizes(),
          ", expected ", features, " features");
    if (is_output && has_bias) layer.bias[i] = vector("an output's bias", layer.bias[i], hidden_size_);
  }
  read_norms(spec, layer);
  ++layer_;
}

void LayerReader::read_norms(const LayerSpec& spec, LayerOperands& layer) {
  for (size_t i = 0; i < LayerSpec::kNorms; ++i) {
    const auto which = static_cast<LayerSpec::NormOf>(i);
    const bool is_of_heads = which == LayerSpec::kQuery || which == LayerSpec::kKey;
    layer.norms[i] = norm_ahead(spec.type_of(which), spec.bits_of(which), spec.eps_of(which),
                                is_of_heads ? spec.head_dim : hidden_size_);
    norm_ += norms_of(spec.bits_of(which));
  }
}

NormOperand LayerReader::norm_ahead(Norm type, int64_t bits, double eps, int64_t width) const {
  size_t at = norm_;
  NormOperand norm{type, {}, {}, eps};
  if (has_bit(bits, 0)) norm.weight = vector("norm", next("tensors of norms", lists_.norms, at), width);
  if (has_bit(bits, 1)) norm.bias = vector("norm bias", next("tensors of norms", lists_.norms, at), width);
  return norm;
}

NormOperand LayerReader::final_norm_ahead(const LayerSpec& last, int64_t bits, double eps) const {
  return norm_ahead(last.type_of(LayerSpec::kAttention), bits, eps, hidden_size_);
}

NormOperand LayerReader::norm_ahead(const LayerSpec& spec) const {
  constexpr auto kFirst = LayerSpec::kAttention;
  if (!spec.norm_first) return NormOperand();
  return norm_ahead(spec.type_of(kFirst), spec.bits_of(kFirst), spec.eps_of(kFirst), hidden_size_);
}

RowsDone norm_heads_rows(const LayerSpec& spec, const LayerOperands& layer, const Heads& heads) {
  const auto rows_of = [&](LayerSpec::NormOf which, const Array& t) -> RowsDone {
    const NormOperand& norm = layer.norm(which);
    if (!norm.weight.defined()) return nullptr;
    check(!spec.merged_qkv, "one Linear is query, key and value, of which two have norms of their heads");
    const int64_t count = t.size(1);
    const Array rows = t.view({t.size(0) * count, t.size(2)}), none;
    return [normed = add_norm_rows(rows, none, none, norm, rows, none), count](int64_t begin, int64_t end) {
      normed(begin * count, end * count);
    };
  };
  const RowsDone query = rows_of(LayerSpec::kQuery, heads.q), key = rows_of(LayerSpec::kKey, heads.k);
  if (!query && !key) return nullptr;
  return [query, key](int64_t begin, int64_t end) {
    if (query) query(begin, end);
    if (key) key(begin, end);
  };
}

size_t LayerReader::norms_left() const {
  const auto left = [](const List<Array>* list, size_t taken) { return list == nullptr ? 0 : list->size() - taken; };
  const size_t others = left(lists_.weights, weight_) + left(lists_.biases, bias_) + left(lists_.scales, scale_);
  check(others == 0, "there are ", others, " weights, biases and weight_scales too many for the layers");
  return left(lists_.norms, norm_);
}

}  // namespace fastbert
