// The registered encoder_layers operator of the CPU backend; fastbert/ops/encoder_layers.py has its schema.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "register.h"

namespace fastbert {

Array encoder_layers_cpu(const Array& x, const Array& cu_seqlens, const List<Array>& weights, const List<Array>& biases,
                         const List<Array>& weight_scales, const List<Array>& input_scales, const List<Array>& norms,
                         const std::string& activation, const std::vector<int64_t>& layers,
                         const std::vector<int64_t>& ints, const std::vector<double>& floats,
                         const std::optional<double>& final_eps, const std::vector<Array>& rotary,
                         const std::vector<int64_t>& rotary_layouts, const OptionalArray& window_positions,
                         const OptionalArray& relative_rows, const OptionalArray& relative_positions,
                         const std::vector<Array>& relative, const std::vector<int64_t>& versions);

}  // namespace fastbert
