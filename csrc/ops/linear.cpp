#include "linear.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "activation.h"
#include "dropout.h"
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
  parallel_for(0, std::min<int64_t>(count, num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t task = next++; task < count; task = next++) f(task);
  });
}

// x as all targets multiply it, converted once into `memory` where every task would have to do it again.
RowsArg converted_rows(const GemmArgs& args, int64_t rows, Array& memory) {
  const PackedWeight& weight = args.targets[0].weight;
  bool is_shared = weight.format != args.x.dtype;
  for (int64_t t = 0; t < args.num_targets; ++t) {
    const GemmTarget& target = args.targets[t];
    is_shared &= target.num_addends == 0 && takes_same_rows(target.weight, weight) &&
                 (target.gate == nullptr || takes_same_rows(target.gate->weight, weight));
  }
  if (!is_shared) return args.x;
  const int64_t stride = row_bytes(weight.format, weight.in_features), scales_at = (rows * stride + 63) / 64 * 64;
  memory = workspace({scales_at + rows * 4}, ScalarType::Byte);
  auto* out = static_cast<char*>(memory.data());
  auto* scales = reinterpret_cast<float*>(out + scales_at);
  parallel_for(0, rows, 1 + 16384 / (weight.in_features + 1),
               [&](int64_t begin, int64_t end) { convert_rows(args.x, begin, end, weight, out, scales); });
  return {out, weight.format, stride / element_size(weight.format), scales};
}

// All of one GEMM, or of several that share x, over the threads.
void run_gemm(const GemmArgs& args_, int64_t rows, const RowsDone& done = nullptr) {
  GemmArgs args = args_;
  int64_t panels = 0;
  for (int64_t t = 0; t < args.num_targets; ++t) panels += num_panels(args.targets[t].weight.out_features);
  const int64_t threads = num_threads(), blocks = num_blocks(rows, kRowBlock, threads);
  if (blocks == 0) return;
  const int64_t groups = panel_groups(rows, blocks, panels, threads);
  Array memory;
  if (groups > 1) args.x = converted_rows(args, rows, memory);
  run_tasks(blocks * groups, [&](int64_t task) {
    const int64_t block = task / groups, group = task % groups;
    const int64_t row_begin = first_row(block, blocks, rows), row_end = first_row(block + 1, blocks, rows);
    if (row_begin == row_end) return;
    gemm(args, row_begin, row_end, group * panels / groups, (group + 1) * panels / groups);
    if (done && groups == 1) done(row_begin, row_end);
  });
  if (done && groups > 1) parallel_for(0, rows, 16, done);
}

// What operands are multiplied in, for results in `dtype`.
DType format_for(ScalarType dtype) {
  return dtype == ScalarType::BFloat16 && has_bf16_dot() ? DType::kBFloat16 : DType::kFloat32;
}

RowsArg rows_of(const Array& x) { return {x.data(), dtype_of(x), x.stride(0)}; }

// A weight, packed, with what its product needs beside it.
struct Operand {
  PackedMemory packed;
  Array bias_copy, scale_copy;  // of those with gaps
  GemmTarget target{};

  Operand(const LinearOperand& linear, int64_t in_features, ScalarType dtype) {
    const Array& weight = linear.weight;
    check(weight.is_cpu(), "weight is on ", weight.device(), ", expected cpu");
    check(weight.dim() == 2 && weight.size(1) == in_features, "weight has shape ", weight.sizes(),
          ", expected (out_features, ", in_features, ")");
    const bool is_int8 = weight.scalar_type() == ScalarType::Char;
    const bool has_scale = linear.weight_scale != nullptr && linear.weight_scale->defined();
    check(is_int8 == has_scale, "weight is ", weight.scalar_type(), " but weight_scale is ",
          has_scale ? "given" : "None", ": int8 weights have a scale, others have none");
    const int64_t out_features = weight.size(0);
    target.bias_dtype = DType::kFloat32;
    if (linear.bias != nullptr && linear.bias->defined()) {
      const ScalarType type = linear.bias->scalar_type();
      check(type == ScalarType::Float || type == ScalarType::BFloat16, "bias is ", type,
            ", expected Float or BFloat16");
      target.bias = checked("bias", *linear.bias, {out_features}, type, bias_copy).data<const void>();
      target.bias_dtype = dtype_of(*linear.bias);
    }
    const float* scale = nullptr;
    if (has_scale) {
      scale =
          checked("weight_scale", *linear.weight_scale, {out_features}, ScalarType::Float, scale_copy).data<float>();
    }
    const DType format = is_int8 ? DType::kInt8 : format_for(dtype);
    packed = packed_weight(weight, format, linear.version);
    target.weight = {packed.panels->data(),
                     format,
                     out_features,
                     in_features,
                     is_int8 ? reinterpret_cast<const int32_t*>(packed.channel_offsets->data()) : nullptr,
                     scale,
                     static_cast<float>(linear.input_scale)};
  }

  void write_to(const Array& out, const Array& pre, Activation activation) {
    target.out = out.data();
    target.out_stride = out.size(1);
    target.pre = pre.data<void>();
    target.pre_stride = out.size(1);
    target.activation = activation;
  }
};

// A weight of which rows or columns lie whole, as packing views of it needs.
Array with_whole_lines(const Array& weight) {
  return weight.stride(0) == 1 || weight.stride(1) == 1 ? weight : contiguous(weight);
}

// The right side of a gradient's product.
Operand transposed(const Array& weight_, int64_t in_features, ScalarType dtype) {
  const Array weight = with_whole_lines(weight_);
  return Operand({weight.t(), nullptr, nullptr, 0.0, version_of(weight)}, in_features, dtype);
}

// x with its rows whole; their stride is free, so that a slice of a wider matrix needs no copy.
Array checked_x(const Array& x, ScalarType dtype) {
  check(x.is_cpu(), "x is on ", x.device(), ", expected cpu");
  check(x.dim() == 2, "x has shape ", x.sizes(), ", expected (total_tokens, in_features)");
  for (const auto type : {x.scalar_type(), dtype}) {
    check(type == ScalarType::Float || type == ScalarType::BFloat16, "dtype is ", type, ", expected Float or BFloat16");
  }
  return x.stride(1) == 1 && x.stride(0) >= x.size(1) ? x : contiguous(x);
}

GemmArgs gemm_args(const Array& x, ScalarType dtype, const GemmTarget* targets, int64_t num_targets) {
  return {rows_of(x), dtype == ScalarType::Float ? DType::kFloat32 : DType::kBFloat16, targets, num_targets};
}

// The operands of a feed-forward's first product: one, or, gated, gate and up. A weight that holds both is packed as
// two views of it, so that one epilogue meets the same columns of both.
struct UpOperands {
  std::vector<Operand> operands;
  std::vector<Array> kept;  // to what they point

  UpOperands(const FeedForwardOperand& of, int64_t in_features, ScalarType dtype) {
    operands.reserve(2);
    if (!of.gated || of.ups.size() == 2) {
      check(of.ups.size() == (of.gated ? 2 : 1), "the first product has ", of.ups.size(), " weights");
      for (const LinearOperand& up : of.ups) operands.emplace_back(up, in_features, dtype);
      check(operands[0].target.weight.out_features == width(), "gate has ", operands[0].target.weight.out_features,
            " features, up ", width());
      return;
    }
    const LinearOperand& both = of.ups[0];
    check(of.ups.size() == 1 && both.weight.dim() == 2 && both.weight.size(0) % 2 == 0, "weight has shape ",
          both.weight.sizes(), ", expected (2 * intermediate_size, ", in_features, ")");
    const int64_t size = both.weight.size(0) / 2;
    const Array weight = with_whole_lines(both.weight);
    const auto half = [&](const Array* vector, int64_t first) {
      if (vector == nullptr || !vector->defined()) return Array();
      check(vector->dim() == 1 && vector->size(0) == 2 * size, "bias or weight_scale has shape ", vector->sizes(),
            ", expected ", 2 * size, " elements");
      kept.push_back(contiguous(*vector));
      return kept.back().narrow(0, first, size);
    };
    kept.push_back(weight);
    for (const int64_t first : {int64_t{0}, size}) {
      const Array bias = half(both.bias, first), scale = half(both.weight_scale, first);
      operands.emplace_back(LinearOperand{weight.narrow(0, first, size), &bias, &scale, both.input_scale, both.version},
                            in_features, dtype);
    }
  }

  int64_t width() const { return operands.back().target.weight.out_features; }
};

// The first product's target, for rows of inner and of pre; the first of them is row `row` of the whole.
struct UpTarget {
  GemmTarget target, gate;

  UpTarget(const UpOperands& ups, const FeedForwardOperand& of, const Array& inner, const Array& pre, int64_t row)
      : target(ups.operands.back().target), gate(ups.operands.front().target) {
    target.out = inner.data();
    target.out_stride = inner.size(1);
    target.pre = pre.data<void>();
    target.pre_stride = of.gated ? 2 * ups.width() : ups.width();
    target.activation = of.gated ? Activation::kNone : of.activation;
    target.dropout = of.dropout.p > 0.0 ? &of.dropout : nullptr;
    target.dropout_row = row;
    if (!of.gated) return;
    target.gate = &gate;
    gate.activation = of.activation;
    gate.pre = target.pre;
    gate.pre_stride = target.pre_stride;
    if (pre.defined()) target.pre = static_cast<char*>(target.pre) + ups.width() * pre.element_size();
  }
  UpTarget(const UpTarget&) = delete;  // it points into itself
  UpTarget& operator=(const UpTarget&) = delete;
};

// (tokens, features) packed along its tokens, for a weight's gradient.
Array pack_tokens(const Array& x_, DType format) {
  const Array x = x_.stride(1) == 1 ? x_ : contiguous(x_);
  const int64_t panels = num_panels(x.size(1));
  const Array packed = workspace({panels * panel_bytes(format, x.size(0))}, ScalarType::Byte);
  const PackArgs args{
      x.data(), dtype_of(x), x.size(1), x.size(0), 1, x.stride(0), format, static_cast<char*>(packed.data()), nullptr};
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) { pack_panels(args, begin, end); });
  return packed;
}

// dout^T x in the weight's dtype, of operands that pack_tokens made.
Array weight_gradient(const Array& dout, const Array& x, DType format, int64_t tokens, const Array& weight) {
  const Array dweight = gradient_like(weight);
  const GemmTransposedArgs args{static_cast<const char*>(dout.data()),
                                static_cast<const char*>(x.data()),
                                format,
                                tokens,
                                weight.size(0),
                                weight.size(1),
                                dweight.data(),
                                dtype_of(weight)};
  parallel_for(0, num_panels(weight.size(0)) * num_panels(weight.size(1)), 1,
               [&](int64_t begin, int64_t end) { gemm_transposed(args, begin, end); });
  return dweight;
}

}  // namespace

Array bias_gradient(const Array& dout, ScalarType dtype) {
  const Array dbias = empty({dout.size(1)}, dtype);
  parallel_for(0, num_panels(dout.size(1)), 1, [&](int64_t begin, int64_t end) {
    column_sums(rows_of(dout), dout.size(0), dbias.data(), dtype_of(dbias), begin * kPanel,
                std::min(end * kPanel, dout.size(1)));
  });
  return dbias;
}

std::vector<Array> linear_cpu(const Array& x_, const std::vector<Array>& weights,
                              const std::vector<OptionalArray>& biases, const std::vector<OptionalArray>& weight_scales,
                              const std::vector<double>& input_scales, const std::string& activation, ScalarType dtype,
                              bool return_pre) {
  const Array x = checked_x(x_, dtype);
  const size_t count = weights.size();
  check(count > 0 && biases.size() == count && weight_scales.size() == count && input_scales.size() == count,
        "weights, biases, weight_scales and input_scales have ", count, ", ", biases.size(), ", ", weight_scales.size(),
        " and ", input_scales.size(), " elements, expected equally many");
  const Activation act = activation_of(activation);
  std::vector<Array> results;
  std::vector<Operand> operands;
  std::vector<GemmTarget> targets;
  operands.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    operands.emplace_back(
        LinearOperand{weights[i], &biases[i], &weight_scales[i], input_scales[i], version_of(weights[i])}, x.size(1),
        dtype);
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
                           ScalarType dtype, bool needs_dx, bool needs_dweight, bool needs_dbias) {
  const Array x = checked_x(x_, dtype);
  const size_t count = weights.size();
  for (size_t i = 0; i < count; ++i) {
    check(weights[i].sizes() == Shape{douts[i].size(1), x.size(1)}, "weight has shape ", weights[i].sizes(),
          ", expected (", douts[i].size(1), ", ", x.size(1), ")");
    check(douts[i].size(0) == x.size(0), "dout has ", douts[i].size(0), " rows, x ", x.size(0));
  }
  const DType format = format_for(dtype);
  const Array dx = empty({needs_dx ? x.size(0) : 0, x.size(1)}, x.scalar_type());
  if (needs_dx) {
    std::vector<Operand> operands;
    std::vector<GemmAddend> addends;
    operands.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      operands.push_back(transposed(weights[i], weights[i].size(0), dtype));
      if (i > 0) addends.push_back({rows_of(douts[i]), operands[i].target.weight});
    }
    GemmTarget& target = operands[0].target;
    target.addends = addends.data();
    target.num_addends = static_cast<int64_t>(addends.size());
    operands[0].write_to(dx, Array(), Activation::kNone);
    run_gemm(gemm_args(douts[0], x.scalar_type(), &target, 1), x.size(0));
  }
  std::vector<Array> dweights, dbiases;
  if (needs_dweight) {
    const Array x_packed = pack_tokens(x, format);
    for (size_t i = 0; i < count; ++i) {
      dweights.push_back(weight_gradient(pack_tokens(douts[i], format), x_packed, format, x.size(0), weights[i]));
    }
  }
  for (size_t i = 0; needs_dbias && i < count; ++i)
    dbiases.push_back(bias_gradient(douts[i], weights[i].scalar_type()));
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
  return linear_gradients(douts, x, weights, dtype, needs_dx, needs_dweight, needs_dbias);
}

void linear_rows(const Array& x_, const std::vector<LinearOperand>& linears, const std::vector<Array>& outs,
                 ScalarType dtype, const RowsDone& done) {
  const Array x = checked_x(x_, dtype);
  std::vector<Operand> operands;
  std::vector<GemmTarget> targets;
  operands.reserve(linears.size());
  for (size_t i = 0; i < linears.size(); ++i) {
    operands.emplace_back(linears[i], x.size(1), dtype);
    operands[i].write_to(outs[i], Array(), Activation::kNone);
    targets.push_back(operands[i].target);
  }
  run_gemm(gemm_args(x, outs[0].scalar_type(), targets.data(), static_cast<int64_t>(targets.size())), x.size(0), done);
}

void feed_forward_rows(const Array& x_, const FeedForwardOperand& operand, const Array& out, const Array& pre,
                       ScalarType dtype, const RowsDone& done) {
  const auto out_dtype = out.scalar_type();
  const Array x = checked_x(x_, dtype);
  const UpOperands ups(operand, x.size(1), dtype);
  const int64_t rows = x.size(0), width = ups.width();
  Operand down(operand.down, width, dtype);

  // A thread takes a block of rows through both products, so that the wide activations between them stay in its cache.
  // With too few rows for that, the threads share each product instead.
  const int64_t threads = num_threads(), blocks = num_blocks(rows, kRowBlock, threads);
  if (blocks < kTasks * threads) {
    const Array inner = workspace({rows, width}, dtype);
    const UpTarget up(ups, operand, inner, pre, 0);
    down.write_to(out, Array(), Activation::kNone);
    run_gemm(gemm_args(x, dtype, &up.target, 1), rows);
    run_gemm(gemm_args(inner, out_dtype, &down.target, 1), rows, done);
    return;
  }
  const Array inner = workspace({threads, kRowBlock, width}, dtype);
  run_tasks(blocks, [&](int64_t block) {
    const Array buffer = inner.select(0, thread_index());
    const int64_t row = first_row(block, blocks, rows), count = first_row(block + 1, blocks, rows) - row;
    if (count == 0) return;
    const UpTarget up(ups, operand, buffer, pre.defined() ? pre.narrow(0, row, count) : pre, row);
    Operand second = down;
    second.write_to(out.narrow(0, row, count), Array(), Activation::kNone);
    gemm(gemm_args(x.narrow(0, row, count), dtype, &up.target, 1), 0, count, 0, num_panels(width));
    gemm(gemm_args(buffer, out_dtype, &second.target, 1), 0, count, 0, num_panels(out.size(1)));
    if (done) done(row, row + count);
  });
}

std::tuple<Array, Array> feed_forward_cpu(const Array& x, const Array& up_weight, const OptionalArray& up_bias,
                                          const Array& down_weight, const OptionalArray& gate_weight,
                                          const OptionalArray& gate_bias, const OptionalArray& up_scale,
                                          const OptionalArray& down_scale, const OptionalArray& gate_scale,
                                          const std::vector<double>& input_scales, const OptionalArray& philox,
                                          double dropout_p, const std::string& activation, bool gated, ScalarType dtype,
                                          bool return_pre) {
  const size_t ups = gate_weight.defined() ? 2 : 1;
  check(input_scales.size() == ups + 1, "input_scales has ", input_scales.size(), " elements, expected ", ups + 1);
  FeedForwardOperand operand{{},
                             {down_weight, nullptr, &down_scale, input_scales[ups], version_of(down_weight)},
                             activation_of(activation),
                             gated,
                             make_dropout(dropout_p, philox)};
  int64_t width = up_weight.size(0);
  if (gate_weight.defined()) {
    operand.ups.push_back({gate_weight, &gate_bias, &gate_scale, input_scales[0], version_of(gate_weight)});
    width += gate_weight.size(0);
  }
  operand.ups.push_back({up_weight, &up_bias, &up_scale, input_scales[ups - 1], version_of(up_weight)});
  const Array out = empty({x.size(0), down_weight.size(0)}, dtype);
  const Array pre = empty({return_pre ? x.size(0) : 0, width}, dtype);
  feed_forward_rows(x, operand, out, return_pre ? pre : Array(), dtype, nullptr);
  return {out, pre};
}

FeedForwardGradients feed_forward_gradients(const Array& dout_, const Array& x_, const Array& pre_,
                                            const std::vector<Array>& ups, const Array& down_weight,
                                            Activation activation, bool gated, const Dropout& dropout, bool needs_dx,
                                            bool needs_dweight, bool needs_dbias) {
  const auto dtype = pre_.scalar_type();
  const Array x = checked_x(x_, dtype);
  const int64_t rows = x.size(0), width = down_weight.size(1), pre_width = gated ? 2 * width : width;
  const Array dout = checked("dout", dout_, {rows, down_weight.size(0)}, dout_.scalar_type());
  const Array pre = checked("pre", pre_, {rows, pre_width}, dtype);
  const DType format = format_for(dtype);

  // The first product's epilogue makes both what its gradient is and, again, what forward did not keep.
  const Array dpre = workspace(pre.sizes(), dtype), inner = workspace({rows, width}, dtype);
  Operand down = transposed(down_weight, down_weight.size(0), dtype);
  down.write_to(dpre, Array(), activation);
  down.target.slope_of = pre.data();
  down.target.activated = inner.data();
  down.target.up_offset = gated ? width : 0;
  down.target.dropout = dropout.p > 0.0 ? &dropout : nullptr;
  run_gemm(gemm_args(dout, dtype, &down.target, 1), rows);

  Array ddown;
  if (needs_dweight) {
    ddown = weight_gradient(pack_tokens(dout, format), pack_tokens(inner, format), format, rows, down_weight);
  } else {
    ddown = empty({0, width}, down_weight);
  }
  std::vector<Array> dpres;
  int64_t first = 0;
  for (const Array& up : ups) {
    dpres.push_back(ups.size() == 1 ? dpre : dpre.narrow(1, first, up.size(0)));
    first += up.size(0);
  }
  check(first == pre_width, "the first product's weights have ", first, " features, pre ", pre_width);
  auto [dx, dups, dbiases] = linear_gradients(dpres, x, ups, dtype, needs_dx, needs_dweight, needs_dbias);
  return {dx, std::move(dups), std::move(dbiases), ddown};
}

FeedForwardGradients feed_forward_bwd_cpu(const Array& dout, const Array& x, const Array& pre, const Array& up_weight,
                                          const Array& down_weight, const OptionalArray& gate_weight,
                                          const OptionalArray& philox, double dropout_p, const std::string& activation,
                                          bool gated, bool needs_dx, bool needs_dweight, bool needs_dbias) {
  std::vector<Array> ups{up_weight};
  if (gate_weight.defined()) ups.insert(ups.begin(), gate_weight);
  return feed_forward_gradients(dout, x, pre, ups, down_weight, activation_of(activation), gated,
                                make_dropout(dropout_p, philox), needs_dx, needs_dweight, needs_dbias);
}

}  // namespace fastbert
