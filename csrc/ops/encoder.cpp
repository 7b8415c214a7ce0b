#include "encoder.h"

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "activation.h"
#include "embedding.h"
#include "encoder_layers.h"
#include "linear.h"
#include "normalize.h"
#include "offsets.h"
#include "pooling.h"
#include "team.h"
#include "tensors.h"
#include "workspace.h"

namespace fastbert {
namespace {

struct Encoder {
  List<OptionalArray> embeddings;  // word, position and token type tables, the norm's weight and bias
  double eps;
  int64_t first_position;  // the first token's; below 0: 0, and all tokens count
  List<Array> weights, biases, weight_scales, input_scales, norms;
  Activation activation;
  std::vector<int64_t> layers;
  std::vector<LayerSpec> specs;
  std::optional<double> final_eps;
  List<OptionalArray> pooler;  // a Linear's weight, bias, weight_scale and input_scale; none: it is not for this
};

std::mutex mutex;
using Encoders = std::unordered_map<int64_t, std::shared_ptr<const Encoder>>;
Encoders& encoders() {
  // Never destroyed: at exit Python's objects may go after static ones.
  static auto* map = new Encoders();
  return *map;
}

// Of each token: its place in its sequence, or, RoBERTa's, counted over the ids that are not padding, which has
// `first` - 1 itself.
Array positions_of(const Array& ids, const Array& offsets, int64_t first) {
  const Array positions = workspace(ids.sizes(), ScalarType::Long);
  const auto* id = ids.data<const int64_t>();
  const auto* offset = offsets.data<const int32_t>();
  auto* position = positions.data<int64_t>();
  const bool counts_all = first < 0;
  for (int64_t i = 0, at = 0; i < offsets.size(0); ++i) {
    // Behind the last sequence are padding rows, whose values are never read.
    const int64_t end = i + 1 < offsets.size(0) ? offset[i + 1] : ids.size(0);
    const bool is_padding = i + 1 == offsets.size(0);
    for (int64_t count = 0; at < end; ++at) {
      if (is_padding) {
        position[at] = 0;
      } else if (counts_all) {
        position[at] = count++;
      } else {
        position[at] = id[at] == first - 1 ? first - 1 : first + count++;
      }
    }
  }
  return positions;
}

// Whether all floats are of the words' dtype, and on the CPU, as they were when the encoder was given its number.
bool has_one_dtype(const Encoder& encoder) {
  const ScalarType dtype = encoder.embeddings[0].scalar_type();
  // are_weights: they may be int8, or packed only, which products compare with what they multiply in.
  const auto fits = [&](const auto& list, bool are_weights) {
    for (size_t i = 0; i < list.size(); ++i) {
      const auto t = list[i];
      const ScalarType type = t.scalar_type();
      const bool is_of_dtype = type == dtype || (are_weights && (type == ScalarType::Char || type == ScalarType::Byte));
      if (t.defined() && !(t.is_cpu() && is_of_dtype)) return false;
    }
    return true;
  };
  return fits(encoder.embeddings, false) && fits(encoder.weights, true) && fits(encoder.biases, false) &&
         fits(encoder.norms, false);
}

}  // namespace

int64_t hold_encoder_cpu(const List<OptionalArray>& embeddings, double eps, int64_t first_position,
                         const List<Array>& weights, const List<Array>& biases, const List<Array>& weight_scales,
                         const List<Array>& input_scales, const List<Array>& norms, const std::string& activation,
                         const std::vector<int64_t>& layers, const std::vector<int64_t>& ints,
                         const std::vector<double>& floats, const std::optional<double>& final_eps,
                         const List<OptionalArray>& pooler) {
  check(pooler.size() == 0 || pooler.size() == 4, "there are ", pooler.size(), " tensors of the pooler, expected four");
  check(embeddings.size() == 5 && embeddings[0].defined(), "there are ", embeddings.size(),
        " tensors of the embeddings, expected five, the first of them there");
  auto held = std::make_shared<const Encoder>(Encoder{
      embeddings.copy(), eps, first_position, weights.copy(), biases.copy(), weight_scales.copy(), input_scales.copy(),
      norms.copy(), activation_of(activation), layers, layer_specs(ints, floats), final_eps, pooler.copy()});
  static int64_t serial = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  encoders()[++serial] = std::move(held);
  return serial;
}

void forget_encoder(int64_t encoder) {
  Encoders::node_type forgotten;  // freed after the lock
  const std::lock_guard<std::mutex> lock(mutex);
  forgotten = encoders().extract(encoder);
}

std::vector<Array> encoder_cpu(const Array& input_ids, const OptionalArray& token_type_ids,
                               const OptionalArray& position_ids, const Array& cu_seqlens, int64_t encoder,
                               const std::vector<int64_t>& versions, bool infers, const std::string& pooling,
                               const std::optional<double>& normalize_eps, bool pools) {
  std::shared_ptr<const Encoder> held;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto entry = encoders().find(encoder);
    check(entry != encoders().end(), "there is no encoder ", encoder);
    held = entry->second;
  }
  check_index(has_one_dtype(*held), "the encoder's tensors are of several dtypes or devices");
  check(!pools || held->pooler.size() > 0, "encoder ", encoder, " has no pooler");
  check(input_ids.dim() == 1, "input_ids has shape ", input_ids.sizes(), ", expected (total_tokens,)");
  const Array ids = checked("input_ids", input_ids, input_ids.sizes(), ScalarType::Long);
  const Array offsets = checked_offsets(cu_seqlens, ids.size(0));
  const List<OptionalArray>& tables = held->embeddings;
  const OptionalArray position = tables[1];
  OptionalArray positions;
  if (position.defined()) {
    positions = position_ids.defined() ? position_ids : OptionalArray(positions_of(ids, offsets, held->first_position));
  }
  std::vector<Array> results;
  with_team([&] {
    const MakeArray make =
        pooling == "none" ? static_cast<MakeArray>(&empty) : &token_workspace;  // what is pooled is not returned
    const Array out = embed_into(make, ids, positions, token_type_ids, tables[0], position, tables[2], tables[3],
                                 tables[4], held->eps);
    const std::vector<Array> none;
    run_layers(out, offsets,
               {held->weights, held->biases, held->weight_scales, held->input_scales, held->norms, held->activation,
                held->layers, held->specs, held->final_eps},
               {none, {}, {}, {}}, {{}, {}, none}, versions, infers ? Comparison::kShare : comparison_of_call(), out);
    const auto pooled = [&](const std::string& mode) {
      return std::get<0>(pooling_fwd_cpu(out, offsets, mode, false));
    };
    results.push_back(pooling == "none" ? out : pooled(pooling));
    if (normalize_eps.has_value()) results.back() = normalize_cpu(results.back(), *normalize_eps);
    if (pools) {
      const List<OptionalArray>& pooler = held->pooler;
      results.push_back(linear_cpu(pooled("cls"), {pooler[0]}, {pooler[1]}, {pooler[2]}, {pooler[3]}, "tanh",
                                   out.scalar_type(), false)[0]);
    }
  });
  return results;
}

}  // namespace fastbert
