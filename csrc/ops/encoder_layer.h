// The registered encoder_layer operators of the CPU backend, for training; fastbert/ops/encoder_layer.py has their
// schemas.
#pragma once

#include <string>

#include <vector>

#include "array.h"

namespace fastbert {

std::vector<Array> encoder_layer_fwd_cpu(const Array& x, const Array& cu_seqlens, const std::vector<Array>& weights,
                                         const std::vector<Array>& biases, const std::vector<Array>& norms,
                                         const OptionalArray& philox, const std::vector<double>& dropouts,
                                         const std::vector<double>& eps, int64_t num_heads,
                                         const std::string& activation, ScalarType dtype);

std::vector<Array> encoder_layer_bwd_cpu(const Array& dout, const Array& x, const Array& cu_seqlens,
                                         const std::vector<Array>& weights, const std::vector<Array>& norms,
                                         const std::vector<Array>& kept, const OptionalArray& philox,
                                         const std::vector<double>& dropouts, const std::string& activation,
                                         bool needs_dx);

}  // namespace fastbert
