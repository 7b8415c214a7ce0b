// The registered add_layer_norm operators of the CPU backend, which with `rms` are add_rms_norm;
// fastbert/ops/layer_norm.py has their schemas.
#pragma once

#include <tuple>

#include "../cpu/layer_norm.h"
#include "array.h"
#include "products.h"

namespace fastbert {

// An undefined weight stands for no norm at all.
struct NormOperand {
  Norm type = Norm::kLayer;
  OptionalArray weight, bias;
  double eps = 0.0;
};

std::tuple<Array, Array, Array, Array> add_layer_norm_fwd_cpu(const Array& x, const OptionalArray& x_bias,
                                                              const OptionalArray& residual, const Array& weight,
                                                              const OptionalArray& bias, const OptionalArray& philox,
                                                              double dropout_p, double eps, bool return_sum,
                                                              bool return_stats, bool rms = false,
                                                              bool zero_centered = false);

// The same with its norm as a record, and `out` in memory of make_out.
std::tuple<Array, Array, Array, Array> add_layer_norm(const Array& x, const OptionalArray& x_bias,
                                                      const OptionalArray& residual, const NormOperand& norm,
                                                      const OptionalArray& philox, double dropout_p, bool return_sum,
                                                      bool return_stats, MakeArray make_out);

// The norm of x's rows alone, in memory of make_out: the numbers that add_layer_norm has given of such a sum.
Array norm_of_rows(const Array& x, const NormOperand& norm, MakeArray make_out);

std::tuple<Array, Array, Array, Array, Array> add_layer_norm_bwd_cpu(const Array& dout, const OptionalArray& dsum,
                                                                     const Array& summed, const Array& mean,
                                                                     const Array& rstd, const Array& weight,
                                                                     const OptionalArray& philox, double dropout_p,
                                                                     bool has_x_bias, bool rms = false,
                                                                     bool zero_centered = false);

// The same of dout + dout_more, which may be undefined, with what has rows, dx and dsummed, in memory of make_rows.
std::tuple<Array, Array, Array, Array, Array> add_layer_norm_gradients(const Array& dout, const Array& dout_more,
                                                                       const OptionalArray& dsum, const Array& summed,
                                                                       const Array& mean, const Array& rstd,
                                                                       const Array& weight, const OptionalArray& philox,
                                                                       double dropout_p, bool has_x_bias, Norm norm,
                                                                       MakeArray make_rows);

// dropout(x + x_bias) + residual.
Array add_dropped(const Array& x, const OptionalArray& x_bias, const OptionalArray& residual,
                  const OptionalArray& philox, double dropout_p);

// What runs rows [begin, end) of
//
//   sum_out    = product + x_bias + residual, rounded to their dtype; undefined: it is not read (post-norm)
//   normed_out = norm of that sum; without a norm the sum, and undefined where sum_out is enough
//
// product, residual and the outputs have one shape and dtype; x_bias and residual may be undefined. Either output may
// be product or residual: a row is read whole before it is written. It holds pointers: the tensors must outlive it.
RowsDone add_norm_rows(const Array& product, const Array& x_bias, const Array& residual, const NormOperand& norm,
                       const Array& normed_out, const Array& sum_out);

}  // namespace fastbert
