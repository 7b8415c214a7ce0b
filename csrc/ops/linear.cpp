#include "linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <atomic>

#include "activation.h"
#include "gradients.h"
#include "packed_weights.h"
#include "tensors.h"
#include "workspace.h"

namespace fastbert {
namespace {

// Rows that a thread takes through all panels, or through both products of a feed-forward, before it goes on: their x
// stays in the second-level cache, while the panels, which all threads read, stream from the third.
constexpr int64_t kRowBlock = 192;
// Tasks a thread that a product is split into, and rows below which it is not.
constexpr int64_t kTasks = 2, kFewRows = 32;

// Blocks of nearly equal size, at most `most` rows each; as many for every thread.
int64_t num_blocks(int64_t rows, int64_t most, int64_t threads) {
  const int64_t blocks = (rows + most - 1) / most;
  return blocks < threads ? blocks : (blocks + threads - 1) / threads * threads;
}

// The first row of a block. No block grows beyond what it had before the rounding, up to a multiple of row_group().
int64_t first_row(int64_t block, int64_t blocks, int64_t rows) {
  const int64_t group = row_group();
  return std::min(rows, (block * rows / blocks + group - 1) / group * group);
}

// How many groups of panels a product is split into where there are few row blocks: more than one for each thread, if
// they come out equal. With few rows a thread streams its half of the weight in one go.
int64_t panel_groups(int64_t rows, int64_t blocks, int64_t panels, int64_t threads) {
  const int64_t least = std::min(panels, (threads + blocks - 1) / blocks);
  if (rows <= kFewRows) return least;
  for (int64_t groups = std::min(panels, (kTasks * threads + blocks - 1) / blocks); groups > least; --groups) {
    if (panels % groups == 0) return groups;
  }
  return least;
}

// f(task) for every task in [0, count), each thread taking the next one when it is done with its last: where something
// else takes a core for a while, the others go on.
template <typename F>
void run_tasks(int64_t count, const F& f) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t task = next++; task < count; task = next++) f(task);
  });
}

// x as all targets multiply it, converted once into `memory` where every task would have to do it again.
RowsArg converted_rows(const GemmArgs& args, int64_t rows, at::Tensor& memory) {
  const PackedWeight& weight = args.targets[0].weight;
  bool is_shared = weight.format != args.x.dtype;
  for (int64_t t = 0; t < args.num_targets; ++t) {
    const GemmTarget& target = args.targets[t];
    is_shared &= target.num_addends == 0 && target.weight.format == weight.format &&
                 target.weight.input_scale == weight.input_scale;
  }
  if (!is_shared) return args.x;
  const int64_t stride = row_bytes(weight.format, weight.in_features), scales_at = (rows * stride + 63) / 64 * 64;
  memory = workspace({scales_at + rows * 4}, at::kByte);
  auto* out = static_cast<char*>(memory.mutable_data_ptr());
  auto* scales = reinterpret_cast<float*>(out + scales_at);
  at::parallel_for(0, rows, 1 + 16384 / (weight.in_features + 1),
                   [&](int64_t begin, int64_t end) { convert_rows(args.x, begin, end, weight, out, scales); });
  return {out, weight.format, stride / element_size(weight.format), scales};
}

// All of one GEMM, or of several that share x, over the threads.
void run_gemm(const GemmArgs& args_, int64_t rows, const RowsDone& done = nullptr) {
  GemmArgs args = args_;
  int64_t panels = 0;
  for (int64_t t = 0; t < args.num_targets; ++t) panels += num_panels(args.targets[t].weight.out_features);
  const int64_t threads = at::get_num_threads(), blocks = num_blocks(rows, kRowBlock, threads);
  if (blocks == 0) return;
  const int64_t groups = panel_groups(rows, blocks, panels, threads);
  at::Tensor memory;
  if (groups > 1) args.x = converted_rows(args, rows, memory);
  run_tasks(blocks * groups, [&](int64_t task) {
    const int64_t block = task / groups, group = task % groups;
    const int64_t row_begin = first_row(block, blocks, rows), row_end = first_row(block + 1, blocks, rows);
    if (row_begin == row_end) return;
    gemm(args, row_begin, row_end, group * panels / groups, (group + 1) * panels / groups);
    if (done && groups == 1) done(row_begin, row_end);
  });
  if (done && groups > 1) at::parallel_for(0, rows, 16, done);
}

// What operands are multiplied in, for results in `dtype`.
DType format_for(at::ScalarType dtype) {
  return dtype == at::kBFloat16 && has_bf16_dot() ? DType::kBFloat16 : DType::kFloat32;
}

RowsArg rows_of(const at::Tensor& x) { return {x.const_data_ptr(), dtype_of(x), x.stride(0)}; }

// A weight, packed, with what its product needs beside it.
struct Operand {
  PackedTensor packed;
  at::Tensor bias, scale;
  GemmTarget target{};

  Operand(const LinearOperand& linear, int64_t in_features, at::ScalarType dtype) {
    const at::Tensor& weight = linear.weight;
    const std::optional<at::Tensor>&bias_ = linear.bias, &scale_ = linear.weight_scale;
    TORCH_CHECK(weight.device().is_cpu(), "weight is on ", weight.device(), ", expected cpu");
    TORCH_CHECK(weight.dim() == 2 && weight.size(1) == in_features, "weight has shape ", weight.sizes(),
                ", expected (out_features, ", in_features, ")");
    const bool is_int8 = weight.scalar_type() == at::kChar;
    TORCH_CHECK(is_int8 == scale_.has_value(), "weight is ", weight.scalar_type(), " but weight_scale is ",
                scale_.has_value() ? "given" : "None", ": int8 weights have a scale, others have none");
    const int64_t out_features = weight.size(0);
    if (bias_.has_value()) {
      TORCH_CHECK(bias_->scalar_type() == at::kFloat || bias_->scalar_type() == at::kBFloat16, "bias is ",
                  bias_->scalar_type(), ", expected Float or BFloat16");
      bias = checked("bias", *bias_, {out_features}, bias_->scalar_type());
    }
    if (is_int8) scale = checked("weight_scale", *scale_, {out_features}, at::kFloat);
    const DType format = is_int8 ? DType::kInt8 : format_for(dtype);
    packed = packed_weight(weight, format);
    target.weight = {static_cast<const char*>(packed.panels.const_data_ptr()),
                     format,
                     out_features,
                     in_features,
                     data<const int32_t>(packed.channel_offsets),
                     data<const float>(scale),
                     static_cast<float>(linear.input_scale)};
    target.bias = data<const void>(bias);
    target.bias_dtype = bias.defined() ? dtype_of(bias) : DType::kFloat32;
  }

  void write_to(const at::Tensor& out, const at::Tensor& pre, Activation activation) {
    target.out = out.mutable_data_ptr();
    target.out_stride = out.size(1);
    target.pre = data<void>(pre);
    target.activation = activation;
  }
};

// x with its rows whole; their stride is free, so that a slice of a wider matrix needs no copy.
at::Tensor checked_x(const at::Tensor& x, at::ScalarType dtype) {
  TORCH_CHECK(x.device().is_cpu(), "x is on ", x.device(), ", expected cpu");
  TORCH_CHECK(x.dim() == 2, "x has shape ", x.sizes(), ", expected (total_tokens, in_features)");
  for (const auto type : {x.scalar_type(), dtype}) {
    TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "dtype is ", type, ", expected Float or BFloat16");
  }
  return x.stride(1) == 1 && x.stride(0) >= x.size(1) ? x : x.contiguous();
}

GemmArgs gemm_args(const at::Tensor& x, at::ScalarType dtype, const GemmTarget* targets, int64_t num_targets) {
  return {rows_of(x), dtype == at::kFloat ? DType::kFloat32 : DType::kBFloat16, targets, num_targets};
}

// (tokens, features) packed along its tokens, for a weight's gradient.
at::Tensor pack_tokens(const at::Tensor& x_, DType format) {
  const at::Tensor x = x_.stride(1) == 1 ? x_ : x_.contiguous();
  const int64_t panels = num_panels(x.size(1));
  const at::Tensor packed = workspace({panels * panel_bytes(format, x.size(0))}, at::kByte);
  const PackArgs args{x.const_data_ptr(),
                      dtype_of(x),
                      x.size(1),
                      x.size(0),
                      1,
                      x.stride(0),
                      format,
                      static_cast<char*>(packed.mutable_data_ptr()),
                      nullptr};
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) { pack_panels(args, begin, end); });
  return packed;
}

// dout^T x in the weight's dtype, of operands that pack_tokens made.
at::Tensor weight_gradient(const at::Tensor& dout, const at::Tensor& x, DType format, int64_t tokens,
                           const at::Tensor& weight) {
  const at::Tensor dweight = gradient_like(weight);
  const GemmTransposedArgs args{static_cast<const char*>(dout.const_data_ptr()),
                                static_cast<const char*>(x.const_data_ptr()),
                                format,
                                tokens,
                                weight.size(0),
                                weight.size(1),
                                dweight.mutable_data_ptr(),
                                dtype_of(weight)};
  at::parallel_for(0, num_panels(weight.size(0)) * num_panels(weight.size(1)), 1,
                   [&](int64_t begin, int64_t end) { gemm_transposed(args, begin, end); });
  return dweight;
}

at::Tensor bias_gradient(const at::Tensor& dout, at::ScalarType dtype) {
  const at::Tensor dbias = at::empty({dout.size(1)}, dout.options().dtype(dtype));
  at::parallel_for(0, num_panels(dout.size(1)), 1, [&](int64_t begin, int64_t end) {
    column_sums(rows_of(dout), dout.size(0), dbias.mutable_data_ptr(), dtype_of(dbias), begin * kPanel,
                std::min(end * kPanel, dout.size(1)));
  });
  return dbias;
}

}  // namespace

std::vector<at::Tensor> linear_cpu(const at::Tensor& x_, at::TensorList weights,
                                   const c10::List<std::optional<at::Tensor>>& biases,
                                   const c10::List<std::optional<at::Tensor>>& weight_scales,
                                   at::ArrayRef<double> input_scales, c10::string_view activation, at::ScalarType dtype,
                                   bool return_pre) {
  const at::Tensor x = checked_x(x_, dtype);
  const size_t count = weights.size();
  TORCH_CHECK(count > 0 && biases.size() == count && weight_scales.size() == count && input_scales.size() == count,
              "weights, biases, weight_scales and input_scales have ", count, ", ", biases.size(), ", ",
              weight_scales.size(), " and ", input_scales.size(), " elements, expected equally many");
  const Activation act = activation_of(activation);
  std::vector<at::Tensor> results;
  std::vector<Operand> operands;
  std::vector<GemmTarget> targets;
  operands.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    operands.emplace_back(LinearOperand{weights[i], biases.get(i), weight_scales.get(i), input_scales[i]}, x.size(1),
                          dtype);
    const auto options = x.options().dtype(dtype);
    results.push_back(at::empty({x.size(0), weights[i].size(0)}, options));
    const at::Tensor out = results.back();
    at::Tensor pre;
    if (return_pre) {
      results.push_back(at::empty_like(out));
      pre = results.back();
    }
    operands.back().write_to(out, pre, act);
    targets.push_back(operands.back().target);
  }
  run_gemm(gemm_args(x, dtype, targets.data(), static_cast<int64_t>(count)), x.size(0));
  return results;
}

Gradients linear_gradients(const std::vector<at::Tensor>& douts, const at::Tensor& x_, at::TensorList weights,
                           at::ScalarType dtype, bool needs_dx, bool needs_dweight, bool needs_dbias) {
  const at::Tensor x = checked_x(x_, dtype);
  const size_t count = weights.size();
  const DType format = format_for(dtype);
  const at::Tensor dx = at::empty({needs_dx ? x.size(0) : 0, x.size(1)}, x.options());
  if (needs_dx) {
    std::vector<Operand> operands;
    std::vector<GemmAddend> addends;
    operands.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      operands.emplace_back(LinearOperand{weights[i].t(), std::nullopt, std::nullopt, 0.0}, weights[i].size(0), dtype);
      if (i > 0) addends.push_back({rows_of(douts[i]), operands[i].target.weight});
    }
    GemmTarget& target = operands[0].target;
    target.addends = addends.data();
    target.num_addends = static_cast<int64_t>(addends.size());
    operands[0].write_to(dx, at::Tensor(), Activation::kNone);
    run_gemm(gemm_args(douts[0], x.scalar_type(), &target, 1), x.size(0));
  }
  std::vector<at::Tensor> dweights, dbiases;
  if (needs_dweight) {
    const at::Tensor x_packed = pack_tokens(x, format);
    for (size_t i = 0; i < count; ++i) {
      dweights.push_back(weight_gradient(pack_tokens(douts[i], format), x_packed, format, x.size(0), weights[i]));
    }
  }
  for (size_t i = 0; needs_dbias && i < count; ++i)
    dbiases.push_back(bias_gradient(douts[i], weights[i].scalar_type()));
  return {dx, dweights, dbiases};
}

Gradients linear_bwd_cpu(at::TensorList douts_, const at::Tensor& x, at::TensorList weights, at::TensorList pres,
                         c10::string_view activation, bool needs_dx, bool needs_dweight, bool needs_dbias) {
  const size_t count = weights.size();
  TORCH_CHECK(count > 0 && douts_.size() == count, "douts has ", douts_.size(), " elements, weights ", count);
  const auto dtype = douts_[0].scalar_type();
  const Activation act = activation_of(activation);
  TORCH_CHECK(pres.size() == (act == Activation::kNone ? 0 : count), "pres has ", pres.size(), " elements");

  std::vector<at::Tensor> douts;
  for (size_t i = 0; i < count; ++i) {
    at::Tensor dout = checked("dout", douts_[i], {x.size(0), weights[i].size(0)}, dtype);
    if (act != Activation::kNone) {
      const at::Tensor pre = checked("pre", pres[i], dout.sizes(), dtype), dpre = workspace(dout.sizes(), dtype);
      const ActivationBwd args{dout.const_data_ptr(), pre.const_data_ptr(), dpre.mutable_data_ptr(), dtype_of(dout),
                               act};
      at::parallel_for(0, dout.numel(), 16384, [&](int64_t begin, int64_t end) { activation_bwd(args, begin, end); });
      dout = dpre;
    }
    douts.push_back(dout);
  }
  return linear_gradients(douts, x, weights, dtype, needs_dx, needs_dweight, needs_dbias);
}

void linear_rows(const at::Tensor& x_, const std::vector<LinearOperand>& linears, const std::vector<at::Tensor>& outs,
                 at::ScalarType dtype, const RowsDone& done) {
  const at::Tensor x = checked_x(x_, dtype);
  std::vector<Operand> operands;
  std::vector<GemmTarget> targets;
  for (size_t i = 0; i < linears.size(); ++i) {
    operands.emplace_back(linears[i], x.size(1), dtype);
    operands[i].write_to(outs[i], at::Tensor(), Activation::kNone);
    targets.push_back(operands[i].target);
  }
  run_gemm(gemm_args(x, outs[0].scalar_type(), targets.data(), static_cast<int64_t>(targets.size())), x.size(0), done);
}

void feed_forward_rows(const at::Tensor& x_, const LinearOperand& up_linear, const LinearOperand& down_linear,
                       c10::string_view activation, const at::Tensor& out, const at::Tensor& pre, at::ScalarType dtype,
                       const RowsDone& done) {
  const auto out_dtype = out.scalar_type();
  const at::Tensor x = checked_x(x_, dtype);
  const int64_t rows = x.size(0), intermediate_size = up_linear.weight.size(0);
  Operand up(up_linear, x.size(1), dtype), down(down_linear, intermediate_size, dtype);
  const Activation act = activation_of(activation);

  // A thread takes a block of rows through both products, so that the wide activations between them stay in its cache.
  // With too few rows for that, the threads share each product instead.
  const int64_t threads = at::get_num_threads(), blocks = num_blocks(rows, kRowBlock, threads);
  if (blocks < kTasks * threads) {
    const at::Tensor inner = workspace({rows, intermediate_size}, dtype);
    up.write_to(inner, pre, act);
    down.write_to(out, at::Tensor(), Activation::kNone);
    run_gemm(gemm_args(x, dtype, &up.target, 1), rows);
    run_gemm(gemm_args(inner, out_dtype, &down.target, 1), rows, done);
    return;
  }
  const at::Tensor inner = workspace({threads, kRowBlock, intermediate_size}, dtype);
  run_tasks(blocks, [&](int64_t block) {
    const at::Tensor buffer = inner.select(0, at::get_thread_num());
    const int64_t row = first_row(block, blocks, rows), count = first_row(block + 1, blocks, rows) - row;
    if (count == 0) return;
    Operand first = up, second = down;
    first.write_to(buffer, pre.defined() ? pre.narrow(0, row, count) : pre, act);
    second.write_to(out.narrow(0, row, count), at::Tensor(), Activation::kNone);
    gemm(gemm_args(x.narrow(0, row, count), dtype, &first.target, 1), 0, count, 0, num_panels(intermediate_size));
    gemm(gemm_args(buffer, out_dtype, &second.target, 1), 0, count, 0, num_panels(out.size(1)));
    if (done) done(row, row + count);
  });
}

std::tuple<at::Tensor, at::Tensor> feed_forward_cpu(const at::Tensor& x, const at::Tensor& up_weight,
                                                    const std::optional<at::Tensor>& up_bias,
                                                    const at::Tensor& down_weight,
                                                    const std::optional<at::Tensor>& up_scale,
                                                    const std::optional<at::Tensor>& down_scale,
                                                    at::ArrayRef<double> input_scales, c10::string_view activation,
                                                    at::ScalarType dtype, bool return_pre) {
  const at::Tensor out = at::empty({x.size(0), down_weight.size(0)}, x.options().dtype(dtype));
  const at::Tensor pre = at::empty({return_pre ? x.size(0) : 0, up_weight.size(0)}, out.options());
  TORCH_CHECK(input_scales.size() == 2, "input_scales has ", input_scales.size(), " elements, expected 2");
  feed_forward_rows(x, {up_weight, up_bias, up_scale, input_scales[0]},
                    {down_weight, std::nullopt, down_scale, input_scales[1]}, activation, out,
                    return_pre ? pre : at::Tensor(), dtype, nullptr);
  return {out, pre};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> feed_forward_bwd_cpu(
    const at::Tensor& dout_, const at::Tensor& x_, const at::Tensor& pre_, const at::Tensor& up_weight,
    const at::Tensor& down_weight, c10::string_view activation, bool needs_dx, bool needs_dweight, bool needs_dbias) {
  const auto dtype = pre_.scalar_type();
  const at::Tensor x = checked_x(x_, dtype);
  const int64_t rows = x.size(0), intermediate_size = up_weight.size(0);
  const at::Tensor dout = checked("dout", dout_, {rows, down_weight.size(0)}, dout_.scalar_type());
  const at::Tensor pre = checked("pre", pre_, {rows, intermediate_size}, dtype);
  const DType format = format_for(dtype);

  // The first product's epilogue makes both what its gradient is and, again, what forward did not keep.
  const at::Tensor dpre = workspace(pre.sizes(), dtype), inner = workspace(pre.sizes(), dtype);
  Operand down({down_weight.t(), std::nullopt, std::nullopt, 0.0}, down_weight.size(0), dtype);
  down.write_to(dpre, at::Tensor(), activation_of(activation));
  down.target.slope_of = pre.const_data_ptr();
  down.target.activated = inner.mutable_data_ptr();
  run_gemm(gemm_args(dout, dtype, &down.target, 1), rows);

  at::Tensor dup, ddown, dbias = at::empty({0}, up_weight.options());
  if (needs_dweight) {
    ddown = weight_gradient(pack_tokens(dout, format), pack_tokens(inner, format), format, rows, down_weight);
    dup = weight_gradient(pack_tokens(dpre, format), pack_tokens(x, format), format, rows, up_weight);
  } else {
    dup = at::empty({0, up_weight.size(1)}, up_weight.options());
    ddown = at::empty({0, down_weight.size(1)}, down_weight.options());
  }
  if (needs_dbias) dbias = bias_gradient(dpre, up_weight.scalar_type());
  const at::Tensor dx = at::empty({needs_dx ? rows : 0, x.size(1)}, x.options());
  if (needs_dx) {
    Operand up({up_weight.t(), std::nullopt, std::nullopt, 0.0}, intermediate_size, dtype);
    up.write_to(dx, at::Tensor(), Activation::kNone);
    run_gemm(gemm_args(dpre, x.scalar_type(), &up.target, 1), rows);
  }
  return {dx, dup, dbias, ddown};
}

}  // namespace fastbert
