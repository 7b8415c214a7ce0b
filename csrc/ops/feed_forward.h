// The registered feed-forward operators of the CPU backend; fastbert/ops/linear/feed_forward.py has their schemas.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "../include/activation.h"
#include "../include/dropout.h"
#include "linear.h"

namespace fastbert {

std::tuple<Array, Array> feed_forward_cpu(const Array& x, const Array& up_weight, const OptionalArray& up_bias,
                                          const Array& down_weight, const OptionalArray& gate_weight,
                                          const OptionalArray& gate_bias, const OptionalArray& up_scale,
                                          const OptionalArray& down_scale, const OptionalArray& gate_scale,
                                          const std::vector<OptionalArray>& input_scales, const OptionalArray& philox,
                                          double dropout_p, const std::string& activation, bool gated, ScalarType dtype,
                                          bool return_pre);

// dx, of every weight of the first product dweight and dbias, and the second product's dweight.
using FeedForwardGradients = std::tuple<Array, std::vector<Array>, std::vector<Array>, Array>;

FeedForwardGradients feed_forward_bwd_cpu(const Array& dout, const Array& x, const Array& pre, const Array& up_weight,
                                          const Array& down_weight, const OptionalArray& gate_weight,
                                          const OptionalArray& philox, double dropout_p, const std::string& activation,
                                          bool gated, bool needs_dx, bool needs_dweight, bool needs_dbias);

// A feed-forward: its first product has one weight, or, gated, gate and up, in two weights or in one that holds gate
// before up. inner = activation(up), or, gated, activation(gate) * up; dropout is inner's (dropout.h: make_dropout).
struct FeedForwardOperand {
  std::vector<LinearOperand> ups;
  LinearOperand down;
  Activation activation;
  bool gated = false;
  Dropout dropout = {0.0, 0, 0};
};

// out = inner down^T + bias; pre, in `dtype`, receives what backward needs, or is undefined: x up^T + bias, of gate and
// up beside each other.
void feed_forward_rows(const Array& x, const FeedForwardOperand& operand, const Array& out, const Array& pre,
                       ScalarType dtype, const RowsDone& done);

// The backward of feed_forward_rows: `pre` is what it kept; ups, activation, gated and dropout are its operand's. dx
// lies in memory of make_dx.
FeedForwardGradients feed_forward_gradients(const Array& dout, const Array& x, const Array& pre,
                                            const std::vector<Array>& ups, const Array& down_weight,
                                            Activation activation, bool gated, const Dropout& dropout, bool needs_dx,
                                            bool needs_dweight, bool needs_dbias, MakeArray make_dx);

}  // namespace fastbert
