// Whole layers, for inference: the registered encoder_layers operator of the CPU backend, whose schema is in
// fastbert/ops/layers/encoder_layers.py, and what it runs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "layer_spec.h"
#include "register.h"

namespace fastbert {

// What layers are made of; of each list, what fastbert/ops/layers/encoder_layers.py says.
struct LayerStack {
  const List<Array>&weights, &biases, &weight_scales, &input_scales, &norms;
  Activation activation;
  const std::vector<int64_t>& layers;  // which of the specs each has
  const std::vector<LayerSpec>& specs;
  const std::optional<double>& final_eps;
};

// x (total_tokens, hidden_size) through all layers, into `out`, which may be x. versions: the weights', or none, and
// each is asked for. comparison: of the weights with their packed copies.
void run_layers(const Array& x, const Array& cu_seqlens, const LayerStack& stack, const AttentionTables& tables,
                const RelativeLists& relative, const std::vector<int64_t>& versions, Comparison comparison,
                const Array& out);

Array encoder_layers_cpu(const Array& x, const Array& cu_seqlens, const List<Array>& weights, const List<Array>& biases,
                         const List<Array>& weight_scales, const List<Array>& input_scales, const List<Array>& norms,
                         const std::string& activation, const std::vector<int64_t>& layers,
                         const std::vector<int64_t>& ints, const std::vector<double>& floats,
                         const std::optional<double>& final_eps, const std::vector<Array>& rotary,
                         const std::vector<int64_t>& rotary_layouts, const OptionalArray& window_positions,
                         const OptionalArray& num_keys, const OptionalArray& relative_rows,
                         const OptionalArray& relative_positions, const std::vector<Array>& relative,
                         const std::vector<int64_t>& versions);

}  // namespace fastbert
