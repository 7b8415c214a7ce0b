// The registered encoder_layers operator of the CPU backend; fastbert/ops/encoder_layers.py has its schema.
#pragma once

#include <string>
#include <vector>

#include "register.h"

namespace fastbert {

Array encoder_layers_cpu(const Array& x, const Array& cu_seqlens, const List<Array>& weights,
                         const List<OptionalArray>& biases, const List<OptionalArray>& weight_scales,
                         const std::vector<double>& input_scales, const List<Array>& norms,
                         const std::vector<double>& eps, int64_t num_heads, const std::string& activation,
                         const std::vector<int64_t>& versions);

}  // namespace fastbert
