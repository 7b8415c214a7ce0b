// The registered linear operators of the CPU backend; fastbert/ops/linear/linear.py has their schemas.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "array.h"
#include "products.h"

namespace fastbert {

std::vector<Array> linear_cpu(const Array& x, const std::vector<Array>& weights,
                              const std::vector<OptionalArray>& biases, const std::vector<OptionalArray>& weight_scales,
                              const std::vector<OptionalArray>& input_scales, const std::string& activation,
                              ScalarType dtype, bool return_pre);

// dx, and of every weight dweight and dbias.
using Gradients = std::tuple<Array, std::vector<Array>, std::vector<Array>>;

Gradients linear_bwd_cpu(const std::vector<Array>& douts, const Array& x, const std::vector<Array>& weights,
                         const std::vector<Array>& pres, const std::string& activation, bool needs_dx,
                         bool needs_dweight, bool needs_dbias);

// outs[i] = x weight^T + bias of linears[i]. What is multiplied is rounded to `dtype`, which here and below may be
// narrower than x, outs and douts are.
void linear_rows(const Array& x, const std::vector<LinearOperand>& linears, const std::vector<Array>& outs,
                 ScalarType dtype, const RowsDone& done);

// The backward of linear_rows: `douts` whole rows, dx as x is, in memory of make_dx.
Gradients linear_gradients(const std::vector<Array>& douts, const Array& x, const std::vector<Array>& weights,
                           ScalarType dtype, bool needs_dx, bool needs_dweight, bool needs_dbias, MakeArray make_dx);

// The sums over tokens.
Array bias_gradient(const Array& dout, ScalarType dtype);

}  // namespace fastbert
