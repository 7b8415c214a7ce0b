#include "layer_form.h"

#include "tensors.h"

namespace fastbert {
namespace {

constexpr size_t kInts = 10, kNumbers = 7;
enum Flag : int64_t { kNormFirst = 1, kMergedQkv = 2, kGated = 4, kMergedGate = 8, kRms = 16 };

// A list's next element.
Array next(const char* name, const List<Array>& list, size_t& at) {
  check(at < list.size(), "there are ", list.size(), " ", name, ", the layers' forms have more");
  return list[at++];
}

bool has_bit(int64_t bits, size_t i) { return (bits >> i & 1) != 0; }

}  // namespace

std::vector<LayerForm> layer_forms(const std::vector<int64_t>& ints, const std::vector<double>& numbers) {
  const size_t count = ints.size() / kInts;
  check(count > 0 && ints.size() == count * kInts && numbers.size() == count * kNumbers, "a form is ", kInts,
        " whole numbers and ", kNumbers, " others, got ", ints.size(), " and ", numbers.size());
  std::vector<LayerForm> forms;
  forms.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const int64_t* n = &ints[i * kInts];
    const double* d = &numbers[i * kNumbers];
    const auto has = [flags = n[6]](Flag flag) { return (flags & flag) != 0; };
    const LayerForm form{n[0],
                         n[1],
                         n[2],
                         n[3],
                         n[4],
                         n[5],
                         has(kNormFirst),
                         has(kMergedQkv),
                         has(kGated),
                         has(kMergedGate),
                         has(kRms),
                         n[7],
                         n[8],
                         n[9],
                         d[0],
                         {d[1], d[2]},
                         {d[3], d[4], d[5], d[6]}};
    check(form.num_heads > 0 && form.num_kv_heads > 0 && form.num_heads % form.num_kv_heads == 0, "num_heads is ",
          form.num_heads, ", num_kv_heads ", form.num_kv_heads);
    check(form.head_dim > 0, "head_dim is ", form.head_dim);
    forms.push_back(form);
  }
  return forms;
}

std::vector<LinearOperand> LayerOperands::projections(const LayerForm& form) const {
  std::vector<LinearOperand> all;
  all.reserve(form.num_projections());
  for (size_t i = 0; i < form.num_projections(); ++i) all.push_back(linear(i));
  return all;
}

LayerReader::LayerReader(const List<Array>& weights, const List<Array>& biases, const List<Array>& scales,
                         const std::vector<double>& input_scales, const List<Array>& norms,
                         const std::vector<int64_t>& versions, int64_t hidden_size, ScalarType dtype)
    : weights_(weights),
      biases_(biases),
      scales_(scales),
      input_scales_(input_scales),
      norms_(norms),
      versions_(versions),
      hidden_size_(hidden_size),
      dtype_(dtype) {
  check(versions.empty() || versions.size() == weights.size(), "there are ", versions.size(), " versions of ",
        weights.size(), " weights");
  check(input_scales.size() == scales.size(), "there are ", input_scales.size(), " input_scales, ", scales.size(),
        " weight_scales");
}

// What norms take: their weights and biases, and the biases of the products before them.
Array LayerReader::vector(const char* name, Array t) const {
  if (t.defined()) check_tensor(name, t, {hidden_size_}, dtype_, cpu());
  return t.is_contiguous() ? t : contiguous(t);
}

void LayerReader::read(const LayerForm& form, LayerOperands& layer) {
  for (size_t i = 0; i < form.num_leaves(); ++i) {
    Array& weight = layer.weight[i];
    layer.version[i] = versions_.empty() ? 0 : versions_[leaf_];
    weight = next("weights", weights_, leaf_);
    if (versions_.empty()) layer.version[i] = version_of(weight);
    const bool has_scale = has_bit(form.scales, i);
    layer.input_scale[i] = has_scale && scale_ < input_scales_.size() ? input_scales_[scale_] : 0.0;
    layer.bias[i] = has_bit(form.biases, i) ? next("biases", biases_, bias_) : Array();
    layer.scale[i] = has_scale ? next("weight_scales", scales_, scale_) : Array();
    const int64_t rows = weight.dim() == 2 ? weight.size(0) : -1;
    const int64_t features = i < form.num_projections()                           ? form.heads_of(i) * form.head_dim
                             : i == form.attention_output() || i == form.down() ? hidden_size_
                                                                                  : rows;
    check(rows == features && rows >= 0, "weight ", i, " of layer ", layer_, " is ", weight.sizes(), ", expected ",
          features, " features");
  }
  ...
}

}  // namespace fastbert
