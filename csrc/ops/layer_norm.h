// The registered add_layer_norm operators of the CPU backend; fastbert/ops/layer_norm.py has their schemas.
#pragma once

#include <functional>
#include <tuple>

#include "array.h"

namespace fastbert {

std::tuple<Array, Array, Array, Array> add_layer_norm_fwd_cpu(const Array& x, const OptionalArray& x_bias,
                                                              const OptionalArray& residual, const Array& weight,
                                                              const OptionalArray& bias, const OptionalArray& philox,
                                                              double dropout_p, double eps, bool return_sum,
                                                              bool return_stats);

std::tuple<Array, Array, Array, Array, Array> add_layer_norm_bwd_cpu(const Array& dout, const OptionalArray& dsum,
                                                                     const Array& summed, const Array& mean,
                                                                     const Array& rstd, const Array& weight,
                                                                     const OptionalArray& philox, double dropout_p,
                                                                     bool has_x_bias);

// What runs rows [begin, end) of LayerNorm(x + x_bias + residual) into out, when x has them; x, residual and out have
// one shape and dtype, and out may be x; x_bias, residual and bias may be undefined. It holds pointers: the tensors
// must outlive it.
std::function<void(int64_t, int64_t)> add_layer_norm_rows(const Array& x, const Array& x_bias, const Array& residual,
                                                          const Array& weight, const Array& bias, double eps,
                                                          const Array& out);

}  // namespace fastbert
