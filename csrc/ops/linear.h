// The registered GEMM operators of the CPU backend; fastbert/ops/linear.py has their schemas.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <tuple>
#include <vector>

namespace fastbert {

std::vector<at::Tensor> linear_cpu(const at::Tensor& x, at::TensorList weights,
                                   const c10::List<std::optional<at::Tensor>>& biases,
                                   const c10::List<std::optional<at::Tensor>>& weight_scales,
                                   at::ArrayRef<double> input_scales, c10::string_view activation, at::ScalarType dtype,
                                   bool return_pre);

// dx, and of every weight dweight and dbias.
using Gradients = std::tuple<at::Tensor, std::vector<at::Tensor>, std::vector<at::Tensor>>;

Gradients linear_bwd_cpu(at::TensorList douts, const at::Tensor& x, at::TensorList weights, at::TensorList pres,
                         c10::string_view activation, bool needs_dx, bool needs_dweight, bool needs_dbias);

std::tuple<at::Tensor, at::Tensor> feed_forward_cpu(const at::Tensor& x, const at::Tensor& up_weight,
                                                    const std::optional<at::Tensor>& up_bias,
                                                    const at::Tensor& down_weight,
                                                    const std::optional<at::Tensor>& up_scale,
                                                    const std::optional<at::Tensor>& down_scale,
                                                    at::ArrayRef<double> input_scales, c10::string_view activation,
                                                    at::ScalarType dtype, bool return_pre);

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> feed_forward_bwd_cpu(
    const at::Tensor& dout, const at::Tensor& x, const at::Tensor& pre, const at::Tensor& up_weight,
    const at::Tensor& down_weight, c10::string_view activation, bool needs_dx, bool needs_dweight, bool needs_dbias);

// Called with rows [begin, end) of a product's result as soon as they are whole, by the thread that made them where
// that is possible: what comes next finds them in its cache.
using RowsDone = std::function<void(int64_t begin, int64_t end)>;

// What is multiplied with: weight (out_features, in_features), bias (out_features,), and for int8 its scales.
struct LinearOperand {
  const at::Tensor& weight;
  std::optional<at::Tensor> bias, weight_scale;
  double input_scale;
};

// outs[i] = x weight^T + bias of linears[i]. What is multiplied is rounded to `dtype`, which here and below may be
// narrower than x, outs and douts are.
void linear_rows(const at::Tensor& x, const std::vector<LinearOperand>& linears, const std::vector<at::Tensor>& outs,
                 at::ScalarType dtype, const RowsDone& done);

// out = activation(x up^T + bias) down^T; pre, in `dtype`, receives what backward needs, or is undefined.
void feed_forward_rows(const at::Tensor& x, const LinearOperand& up, const LinearOperand& down,
                       c10::string_view activation, const at::Tensor& out, const at::Tensor& pre, at::ScalarType dtype,
                       const RowsDone& done);

// The backward of linear_rows: `douts` whole rows, dx as x is.
Gradients linear_gradients(const std::vector<at::Tensor>& douts, const at::Tensor& x, at::TensorList weights,
                           at::ScalarType dtype, bool needs_dx, bool needs_dweight, bool needs_dbias);

}  // namespace fastbert
