// The registered encoder_layers operators of the CPU backend for training; fastbert/ops/layers/encoder_layers.py has
// their schemas.
#pragma once

#include <string>
#include <vector>

#include "register.h"

namespace fastbert {

std::vector<Array> encoder_layers_fwd_cpu(const Array& x, const Array& cu_seqlens, const List<Array>& weights,
                                          const List<Array>& biases, const List<Array>& norms,
                                          const OptionalArray& philox, const std::string& activation,
                                          const std::vector<int64_t>& layers, const std::vector<int64_t>& ints,
                                          const std::vector<double>& floats, const std::vector<Array>& rotary,
                                          const std::vector<int64_t>& rotary_layouts,
                                          const OptionalArray& window_positions, const OptionalArray& num_keys,
                                          const OptionalArray& relative_rows, const OptionalArray& relative_positions,
                                          const std::vector<Array>& relative, ScalarType dtype);

std::vector<Array> encoder_layers_bwd_cpu(const Array& dout, const Array& x, const Array& cu_seqlens,
                                          const List<Array>& weights, const List<Array>& norms,
                                          const std::vector<Array>& kept, const OptionalArray& philox,
                                          const std::string& activation, const std::vector<int64_t>& layers,
                                          const std::vector<int64_t>& ints, const std::vector<double>& floats,
                                          const std::vector<Array>& rotary, const std::vector<int64_t>& rotary_layouts,
                                          const OptionalArray& window_positions, const OptionalArray& num_keys,
                                          const OptionalArray& relative_rows, const OptionalArray& relative_positions,
                                          const std::vector<Array>& relative, bool needs_dx);

}  // namespace fastbert
