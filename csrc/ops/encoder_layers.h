// The registered encoder_layers operator of the CPU backend; fastbert/ops/encoder_layers.py has its schema.
#pragma once

#include <string>
#include <vector>
#include "array.h"

namespace fastbert {

Array encoder_layers_cpu(const Array& x, const Array& cu_seqlens, const std::vector<Array>& weights,
                         const std::vector<OptionalArray>& biases, const std::vector<OptionalArray>& weight_scales,
                         const std::vector<double>& input_scales, const std::vector<Array>& norms,
                         const std::vector<double>& eps, int64_t num_heads, const std::string& activation,
                         const std::vector<int64_t>& versions);

}  // namespace fastbert
