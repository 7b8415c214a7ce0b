// The registered operators of the CUDA backend; each op's file in fastbert/ops/ has its schemas.
#pragma once

#include <string>

#include <tuple>
#include <vector>

#include "../array.h"

namespace fastbert {

std::tuple<Array, Array, Array, Array> add_layer_norm_fwd_cuda(const Array& x, const OptionalArray& x_bias,
                                                               const OptionalArray& residual, const Array& weight,
                                                               const OptionalArray& bias, const OptionalArray& philox,
                                                               double dropout_p, double eps, bool return_sum,
                                                               bool return_stats, bool rms);

std::tuple<Array, Array, Array, Array, Array> add_layer_norm_bwd_cuda(const Array& dout, const OptionalArray& dsum,
                                                                      const Array& summed, const Array& mean,
                                                                      const Array& rstd, const Array& weight,
                                                                      const OptionalArray& philox, double dropout_p,
                                                                      bool has_x_bias, bool rms);

Array embed_fwd_cuda(const OptionalArray& input_ids, const OptionalArray& position_ids,
                     const OptionalArray& token_type_ids, const Array& word, const OptionalArray& position,
                     const OptionalArray& token_type, const OptionalArray& weight, const OptionalArray& bias,
                     double eps);

std::tuple<Array, Array> feed_forward_cuda(const Array& x, const Array& up_weight, const OptionalArray& up_bias,
                                           const Array& down_weight, const OptionalArray& gate_weight,
                                           const OptionalArray& gate_bias, const std::string& activation, bool gated,
                                           bool return_pre);

std::tuple<Array, std::vector<Array>, std::vector<Array>, Array> feed_forward_bwd_cuda(
    const Array& dout, const Array& x, const Array& pre, const Array& up_weight, const Array& down_weight,
    const OptionalArray& gate_weight, const std::string& activation, bool gated, bool needs_dx, bool needs_dweight,
    bool needs_dbias);

}  // namespace fastbert
