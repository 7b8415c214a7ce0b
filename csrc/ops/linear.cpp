#include "linear.h"

#include <utility>

#include "activation.h"
#include "tensors.h"
#include "workspace.h"

namespace fastbert {

Array bias_gradient(const Array& dout, ScalarType dtype) {
  const Array dbias = empty({dout.size(1)}, dtype);
  sum_columns(dout, dbias);
  return dbias;
}

std::vector<Array> linear_cpu(const Array& x_, const std::vector<Array>& weights,
                              const std::vector<OptionalArray>& biases, const std::vector<OptionalArray>& weight_scales,
                              const std::vector<OptionalArray>& input_scales, const std::string& activation,
                              ScalarType dtype, bool return_pre) {
  const Array x = checked_x(x_, dtype);
  const size_t count = weights.size();
  check(count > 0 && biases.size() == count && weight_scales.size() == count && input_scales.size() == count,
        "weights, biases, weight_scales and input_scales have ", count, ", ", biases.size(), ", ", weight_scales.size(),
        " and ", input_scales.size(), " elements, expected equally many");
  const Activation act = activation_of(activation);
  const Comparison comparison = comparison_of_call();
  std::vector<Array> results;
  std::vector<Operand> operands;
  std::vector<GemmTarget> targets;
  operands.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    operands.emplace_back(
        LinearOperand{weights[i], &biases[i], &weight_scales[i], &input_scales[i], version_of(weights[i]), comparison},
        x.size(0), x.size(1), dtype);
    results.push_back(empty({x.size(0), weights[i].size(0)}, dtype));
    const Array out = results.back();
    Array pre;
    if (return_pre) {
      results.push_back(empty_like(out));
      pre = results.back();
    }
    operands.back().write_to(out, pre, act);
    targets.push_back(operands.back().target);
  }
  run_gemm(gemm_args(x, dtype, targets.data(), static_cast<int64_t>(count)), x.size(0));
  return results;
}

Gradients linear_gradients(const std::vector<Array>& douts, const Array& x_, const std::vector<Array>& weights,
                           ScalarType dtype, bool needs_dx, bool needs_dweight, bool needs_dbias, MakeArray make_dx) {
  const Array x = checked_x(x_, dtype);
  const size_t count = weights.size();
  for (size_t i = 0; i < count; ++i) {
    check(weights[i].sizes() == Shape{douts[i].size(1), x.size(1)}, "weight has shape ", weights[i].sizes(),
          ", expected (", douts[i].size(1), ", ", x.size(1), ")");
    check(douts[i].size(0) == x.size(0), "dout has ", douts[i].size(0), " rows, x ", x.size(0));
  }
  const DType format = format_for(dtype);
  const Array dx = make_dx({needs_dx ? x.size(0) : 0, x.size(1)}, x.scalar_type());
  if (needs_dx) {
    std::vector<Operand> operands;
    std::vector<GemmAddend> addends;
    operands.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      operands.push_back(transposed(weights[i], x.size(0), weights[i].size(0), dtype));
      if (i > 0) addends.push_back({rows_of(douts[i]), operands[i].target.weight});
    }
    GemmTarget& target = operands[0].target;
    target.addends = addends.data();
    target.num_addends = static_cast<int64_t>(addends.size());
    operands[0].write_to(dx, Array(), Activation::kNone);
    run_gemm(gemm_args(douts[0], x.scalar_type(), &target, 1), x.size(0));
  }
  std::vector<Array> dweights, dbiases;
  const Array x_packed = needs_dweight ? pack_tokens(x, format) : Array();
  for (size_t i = 0; i < count; ++i) {
    // Packed without rounding, they are also what the bias's gradient is summed from.
    const bool is_exact = format == DType::kFloat32 || dtype_of(douts[i]) == format;
    Array dbias;
    if (needs_dbias) {
      const ScalarType type = weights[i].scalar_type();
      dbias = needs_dweight && is_exact ? empty({douts[i].size(1)}, type) : bias_gradient(douts[i], type);
      dbiases.push_back(dbias);
    }
    if (needs_dweight) {
      const Array packed = pack_tokens(douts[i], format, is_exact ? dbias : Array());
      dweights.push_back(weight_gradient(packed, x_packed, format, x.size(0), weights[i]));
    }
  }
  return {dx, dweights, dbiases};
}

Gradients linear_bwd_cpu(const std::vector<Array>& douts_, const Array& x, const std::vector<Array>& weights,
                         const std::vector<Array>& pres, const std::string& activation, bool needs_dx,
                         bool needs_dweight, bool needs_dbias) {
  const size_t count = weights.size();
  check(count > 0 && douts_.size() == count, "douts has ", douts_.size(), " elements, weights ", count);
  const auto dtype = douts_[0].scalar_type();
  const Activation act = activation_of(activation);
  check(pres.size() == (act == Activation::kNone ? 0 : count), "pres has ", pres.size(), " elements");

  std::vector<Array> douts;
  for (size_t i = 0; i < count; ++i) {
    Array dout = checked("dout", douts_[i], {x.size(0), weights[i].size(0)}, dtype);
    if (act != Activation::kNone) {
      const Array pre = checked("pre", pres[i], dout.sizes(), dtype), dpre = workspace(dout.sizes(), dtype);
      const ActivationBwd args{dout.data(), pre.data(), dpre.data(), dtype_of(dout), act};
      parallel_for(0, dout.numel(), 16384, [&](int64_t begin, int64_t end) { activation_bwd(args, begin, end); });
      dout = dpre;
    }
    douts.push_back(dout);
  }
  return linear_gradients(douts, x, weights, dtype, needs_dx, needs_dweight, needs_dbias, empty);
}

void linear_rows(const Array& x_, const std::vector<LinearOperand>& linears, const std::vector<Array>& outs,
                 ScalarType dtype, const RowsDone& done) {
  const Array x = checked_x(x_, dtype);
  std::vector<Operand> operands;
  std::vector<GemmTarget> targets;
  operands.reserve(linears.size());
  for (size_t i = 0; i < linears.size(); ++i) {
    operands.emplace_back(linears[i], x.size(0), x.size(1), dtype);
    operands[i].write_to(outs[i], Array(), Activation::kNone);
    targets.push_back(operands[i].target);
  }
  run_gemm(gemm_args(x, outs[0].scalar_type(), targets.data(), static_cast<int64_t>(targets.size())), x.size(0), done);
}

}  // namespace fastbert
