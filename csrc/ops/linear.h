// The registered GEMM operators of the CPU backend; fastbert/ops/linear.py has their schemas.
#pragma once

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "../include/activation.h"
#include "../include/dropout.h"
#include "array.h"

namespace fastbert {

std::vector<Array> linear_cpu(const Array& x, const std::vector<Array>& weights,
                              const std::vector<OptionalArray>& biases, const std::vector<OptionalArray>& weight_scales,
                              const std::vector<double>& input_scales, const std::string& activation, ScalarType dtype,
                              bool return_pre);

// dx, and of every weight dweight and dbias.
using Gradients = std::tuple<Array, std::vector<Array>, std::vector<Array>>;

Gradients linear_bwd_cpu(const std::vector<Array>& douts, const Array& x, const std::vector<Array>& weights,
                         const std::vector<Array>& pres, const std::string& activation, bool needs_dx,
                         bool needs_dweight, bool needs_dbias);

std::tuple<Array, Array> feed_forward_cpu(const Array& x, const Array& up_weight, const OptionalArray& up_bias,
                                          const Array& down_weight, const OptionalArray& gate_weight,
                                          const OptionalArray& gate_bias, const OptionalArray& up_scale,
                                          const OptionalArray& down_scale, const OptionalArray& gate_scale,
                                          const std::vector<double>& input_scales, const OptionalArray& philox,
                                          double dropout_p, const std::string& activation, bool gated, ScalarType dtype,
                                          bool return_pre);

// dx, of every weight of the first product dweight and dbias, and the second product's dweight.
using FeedForwardGradients = std::tuple<Array, std::vector<Array>, std::vector<Array>, Array>;

FeedForwardGradients feed_forward_bwd_cpu(const Array& dout, const Array& x, const Array& pre, const Array& up_weight,
                                          const Array& down_weight, const OptionalArray& gate_weight,
                                          const OptionalArray& philox, double dropout_p, const std::string& activation,
                                          bool gated, bool needs_dx, bool needs_dweight, bool needs_dbias);

// Called with rows [begin, end) of a product's result as soon as they are whole, by the thread that made them where
// that is possible: what comes next finds them in its cache.
using RowsDone = std::function<void(int64_t begin, int64_t end)>;

// What is multiplied with: weight (out_features, in_features), bias (out_features,), and for int8 its scales. They are
// the caller's: a stack of layers names hundreds.
struct LinearOperand {
  const Array& weight;
  const Array* bias;          // null, or undefined: there is none
  const Array* weight_scale;  // likewise
  double input_scale;
  int64_t version;  // of the weight: packed_weights.h
};

// outs[i] = x weight^T + bias of linears[i]. What is multiplied is rounded to `dtype`, which here and below may be
// narrower than x, outs and douts are.
void linear_rows(const Array& x, const std::vector<LinearOperand>& linears, const std::vector<Array>& outs,
                 ScalarType dtype, const RowsDone& done);

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

// The backward of feed_forward_rows: `pre` is what it kept; ups, activation, gated and dropout are its operand's.
FeedForwardGradients feed_forward_gradients(const Array& dout, const Array& x, const Array& pre,
                                            const std::vector<Array>& ups, const Array& down_weight,
                                            Activation activation, bool gated, const Dropout& dropout, bool needs_dx,
                                            bool needs_dweight, bool needs_dbias);

// The backward of linear_rows: `douts` whole rows, dx as x is.
Gradients linear_gradients(const std::vector<Array>& douts, const Array& x, const std::vector<Array>& weights,
                           ScalarType dtype, bool needs_dx, bool needs_dweight, bool needs_dbias);

// The sums over tokens.
Array bias_gradient(const Array& dout, ScalarType dtype);

}  // namespace fastbert
