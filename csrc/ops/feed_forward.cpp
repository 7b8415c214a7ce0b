#include "feed_forward.h"

#include <utility>

#include "activation.h"
#include "dropout.h"
#include "tensors.h"
#include "workspace.h"

namespace fastbert {
namespace {

// The operands of a feed-forward's first product: one, or, gated, gate and up. A weight that holds both is packed as
// two views of it, so that one epilogue meets the same columns of both.
struct UpOperands {
  std::vector<Operand> operands;
  std::vector<Array> kept;  // to what they point

  UpOperands(const FeedForwardOperand& of, int64_t rows, int64_t in_features, ScalarType dtype) {
    operands.reserve(2);
    if (!of.gated || of.ups.size() == 2) {
      check(of.ups.size() == (of.gated ? 2 : 1), "the first product has ", of.ups.size(), " weights");
      for (const LinearOperand& up : of.ups) operands.emplace_back(up, rows, in_features, dtype);
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
      operands.emplace_back(
          LinearOperand{weight.narrow(0, first, size), &bias, &scale, both.input_scale, both.version, both.comparison},
          rows, in_features, dtype);
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

}  // namespace

void feed_forward_rows(const Array& x_, const FeedForwardOperand& operand, const Array& out, const Array& pre,
                       ScalarType dtype, const RowsDone& done) {
  const auto out_dtype = out.scalar_type();
  const Array x = checked_x(x_, dtype);
  const int64_t rows = x.size(0);
  const UpOperands ups(operand, rows, x.size(1), dtype);
  const int64_t width = ups.width();
  Operand down(operand.down, rows, width, dtype);

  // A thread takes a block of rows through both products, so that the wide activations between them stay in its cache.
  // With too few rows for that, the threads share each product instead.
  const int64_t threads = num_threads();
  const bool share_rows = shares_rows(rows, threads, down.target.weight);
  const int64_t blocks = num_blocks(rows, threads, share_rows);
  if (!has_products() || (!share_rows && blocks < kTasks * threads)) {
    const Array inner = workspace({rows, width}, dtype);
    const UpTarget up(ups, operand, inner, pre, 0);
    down.write_to(out, Array(), Activation::kNone);
    run_gemm(gemm_args(x, dtype, &up.target, 1), rows);
    run_gemm(gemm_args(inner, out_dtype, &down.target, 1), rows, done);
    return;
  }
  const Array inner = workspace({threads, kRowBlock, width}, dtype);
  const UpTarget first_up(ups, operand, inner, pre, 0);
  const char* const next = next_panels(gemm_args(x, dtype, &first_up.target, 1), 1, blocks)[0];
  run_tasks(blocks, [&](int64_t block) {
    const Array buffer = inner.select(0, thread_index());
    const int64_t row = first_row(block, blocks, rows), count = first_row(block + 1, blocks, rows) - row;
    if (count == 0) return;
    const UpTarget up(ups, operand, buffer, pre.defined() ? pre.narrow(0, row, count) : pre, row);
    Operand second = down;
    second.write_to(out.narrow(0, row, count), Array(), Activation::kNone);
    GemmArgs to_inner = gemm_args(x.narrow(0, row, count), dtype, &up.target, 1);
    GemmArgs to_out = gemm_args(buffer, out_dtype, &second.target, 1);
    to_inner.next = second.target.weight.packed;
    to_out.next = next;
    gemm(to_inner, 0, count, 0, num_panels(width));
    gemm(to_out, 0, count, 0, num_panels(out.size(1)));
    if (done) done(row, row + count);
  });
}

std::tuple<Array, Array> feed_forward_cpu(const Array& x, const Array& up_weight, const OptionalArray& up_bias,
                                          const Array& down_weight, const OptionalArray& gate_weight,
                                          const OptionalArray& gate_bias, const OptionalArray& up_scale,
                                          const OptionalArray& down_scale, const OptionalArray& gate_scale,
                                          const std::vector<OptionalArray>& input_scales, const OptionalArray& philox,
                                          double dropout_p, const std::string& activation, bool gated, ScalarType dtype,
                                          bool return_pre) {
  const size_t ups = gate_weight.defined() ? 2 : 1;
  check(input_scales.size() == ups + 1, "input_scales has ", input_scales.size(), " elements, expected ", ups + 1);
  const Comparison comparison = comparison_of_call();
  FeedForwardOperand operand{
      {},
      {down_weight, nullptr, &down_scale, &input_scales[ups], version_of(down_weight), comparison},
      activation_of(activation),
      gated,
      make_dropout(dropout_p, philox)};
  int64_t width = up_weight.size(0);
  if (gate_weight.defined()) {
    operand.ups.push_back(
        {gate_weight, &gate_bias, &gate_scale, &input_scales[0], version_of(gate_weight), comparison});
    width += gate_weight.size(0);
  }
  operand.ups.push_back({up_weight, &up_bias, &up_scale, &input_scales[ups - 1], version_of(up_weight), comparison});
  const Array out = empty({x.size(0), down_weight.size(0)}, dtype);
  const Array pre = empty({return_pre ? x.size(0) : 0, width}, dtype);
  feed_forward_rows(x, operand, out, return_pre ? pre : Array(), dtype, nullptr);
  return {out, pre};
}

FeedForwardGradients feed_forward_gradients(const Array& dout_, const Array& x_, const Array& pre_,
                                            const std::vector<Array>& ups, const Array& down_weight,
                                            Activation activation, bool gated, const Dropout& dropout, bool needs_dx,
                                            bool needs_dweight, bool needs_dbias, MakeArray make_dx) {
  const auto dtype = pre_.scalar_type();
  const Array x = checked_x(x_, dtype);
  const int64_t rows = x.size(0), width = down_weight.size(1), pre_width = gated ? 2 * width : width;
  const Array dout = checked("dout", dout_, {rows, down_weight.size(0)}, dout_.scalar_type());
  const Array pre = checked("pre", pre_, {rows, pre_width}, dtype);
  const DType format = format_for(dtype);

  // The first product's epilogue makes both what its gradient is and, again, what forward did not keep.
  const Array dpre = workspace(pre.sizes(), dtype), inner = workspace({rows, width}, dtype);
  Operand down = transposed(down_weight, rows, down_weight.size(0), dtype);
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
  auto [dx, dups, dbiases] = linear_gradients(dpres, x, ups, dtype, needs_dx, needs_dweight, needs_dbias, make_dx);
  return {dx, std::move(dups), std::move(dbiases), ddown};
}

FeedForwardGradients feed_forward_bwd_cpu(const Array& dout, const Array& x, const Array& pre, const Array& up_weight,
                                          const Array& down_weight, const OptionalArray& gate_weight,
                                          const OptionalArray& philox, double dropout_p, const std::string& activation,
                                          bool gated, bool needs_dx, bool needs_dweight, bool needs_dbias) {
  std::vector<Array> ups{up_weight};
  if (gate_weight.defined()) ups.insert(ups.begin(), gate_weight);
  return feed_forward_gradients(dout, x, pre, ups, down_weight, activation_of(activation), gated,
                                make_dropout(dropout_p, philox), needs_dx, needs_dweight, needs_dbias, empty);
}

}  // namespace fastbert
