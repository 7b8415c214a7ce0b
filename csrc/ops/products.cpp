#include "products.h"

#include <limits>
#include <utility>

#include "gradients.h"
#include "packed_only.h"
#include "residuals.h"
#include "tensors.h"
#include "torch_products.h"
#include "workspace.h"

namespace fastbert {
namespace {

// Rows of each thread from which on threads share rows (shares_rows): two threads of an EPYC (Zen 4) with caches of
// their own take 0.78 to 0.97 of the time from there on, with one cache 0.97 to 1.02, and with a half as many rows and
// BERT-base's weights, which are in no cache, 1.13 (bfloat16) and 1.12 (float32). Of layers whose weights stay in the
// third-level cache, four rows are enough: 0.79 to 0.91 of the time, with one cache 0.92 to 0.98.
constexpr int64_t kLeastInt8Rows = 8, kLeastRows = 32, kLeastRowsOfFew = 4, kFewBytes = 12 << 20;

// Of the calling thread.
struct Stack {
  int64_t bytes = 0;                             // 0: unknown
  size_t count = 0;                              // of its products until now
  std::vector<std::vector<const char*>> panels;  // of each product of the last one: where each group's begin
};

Stack& stack() {
  static thread_local Stack stack;
  return stack;
}

// Where the panels [at, ...) of a product begin, counted through all targets; null where they are not packed.
const char* panel_at(const GemmArgs& args, int64_t at) {
  for (int64_t t = 0; t < args.num_targets; ++t) {
    const GemmTarget& target = args.targets[t];
    const PackedWeight& weight = target.gate != nullptr ? target.gate->weight : target.weight;
    const int64_t panels = num_panels(weight.out_features);
    if (at < panels) {
      return weight.packed == nullptr ? nullptr : weight.packed + at * panel_bytes(weight.format, weight.in_features);
    }
    at -= panels;
  }
  return nullptr;
}

int64_t num_panels_of(const GemmArgs& args) {
  int64_t panels = 0;
  for (int64_t t = 0; t < args.num_targets; ++t) panels += num_panels(args.targets[t].weight.out_features);
  return panels;
}

// How many groups of panels a product is split into where there are few row blocks: more than one for each thread, if
// they come out equal, and equally many for every thread. With few rows a thread streams its half of the weight in one
// go.
int64_t panel_groups(int64_t rows, int64_t blocks, int64_t panels, int64_t threads) {
  const int64_t least = std::min(panels, (threads + blocks - 1) / blocks);
  if (rows <= kFewRows) return least;
  for (int64_t groups = std::min(panels, (kTasks * threads + blocks - 1) / blocks); groups > least; --groups) {
    if (panels % groups == 0 && blocks * groups % threads == 0) return groups;
  }
  return least;
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

}  // namespace

StackProducts::StackProducts(int64_t bytes)
    : bytes_before_(std::exchange(stack().bytes, bytes)), count_before_(std::exchange(stack().count, 0)) {}
StackProducts::~StackProducts() {
  stack().bytes = bytes_before_;
  stack().count = count_before_;
}

const std::vector<const char*>& next_panels(const GemmArgs& args, int64_t groups, int64_t blocks) {
  static thread_local std::vector<const char*> unknown;
  unknown.assign(static_cast<size_t>(groups), nullptr);
  Stack& current = stack();
  if (current.bytes == 0) return unknown;
  const size_t at = current.count++;
  if (current.panels.size() < at + 2) current.panels.resize(at + 2);
  std::vector<const char*>& mine = current.panels[at];
  mine.resize(static_cast<size_t>(groups));
  const int64_t panels = num_panels_of(args);
  for (int64_t group = 0; group < groups; ++group) {
    mine[static_cast<size_t>(group)] = panel_at(args, group * panels / groups);
  }
  const std::vector<const char*>& next = current.panels[at + 1];
  // Of more parts than threads it is unknown which one a thread takes next.
  return next.size() == mine.size() && groups * blocks <= num_threads() ? next : unknown;
}

bool shares_rows(int64_t rows, int64_t threads, const PackedWeight& weight) {
  const bool is_few = stack().bytes > 0 && stack().bytes <= kFewBytes;
  const int64_t least = is_few ? kLeastRowsOfFew : weight.format == DType::kInt8 ? kLeastInt8Rows : kLeastRows;
  // AMX multiplies so much faster that it would wait; a weight that is packed on its way is packed once.
  return threads > 1 && row_group() == 1 && weight.packed != nullptr && rows >= least * threads;
}

int64_t num_blocks(int64_t rows, int64_t threads, bool share_rows) {
  const int64_t blocks = (rows + kRowBlock - 1) / kRowBlock;
  return blocks < threads && !share_rows ? blocks : (blocks + threads - 1) / threads * threads;
}

int64_t first_row(int64_t block, int64_t blocks, int64_t rows) {
  const int64_t group = row_group();
  return std::min(rows, (block * rows / blocks + group - 1) / group * group);
}

void run_gemm(const GemmArgs& args_, int64_t rows, const RowsDone& done) {
  if (!has_products()) return multiply_by_torch(args_, rows, done);
  GemmArgs args = args_;
  const int64_t panels = num_panels_of(args), threads = num_threads();
  const bool share_rows = shares_rows(rows, threads, args.targets[0].weight);
  const int64_t blocks = num_blocks(rows, threads, share_rows);
  if (blocks == 0) return;
  const int64_t groups = share_rows ? 1 : panel_groups(rows, blocks, panels, threads);
  Array memory;
  if (groups > 1) args.x = converted_rows(args, rows, memory);
  const std::vector<const char*>& next = next_panels(args, groups, blocks);
  run_tasks(blocks * groups, [&](int64_t task) {
    const int64_t block = task / groups, group = task % groups;
    const int64_t row_begin = first_row(block, blocks, rows), row_end = first_row(block + 1, blocks, rows);
    if (row_begin == row_end) return;
    GemmArgs part = args;
    part.next = next[static_cast<size_t>(group)];
    gemm(part, row_begin, row_end, group * panels / groups, (group + 1) * panels / groups);
    if (done && groups == 1) done(row_begin, row_end);
  });
  if (done && groups > 1) parallel_for(0, rows, 16, done);
}

RowsArg rows_of(const Array& x) { return {x.data(), dtype_of(x), x.stride(0)}; }

// 0, as where there is none: each row of x is measured.
float input_scale_of(const LinearOperand& linear) {
  if (linear.input_scale == nullptr || !linear.input_scale->defined()) return 0.0f;
  const Array& t = *linear.input_scale;
  check(t.is_cpu() && t.scalar_type() == ScalarType::Float && t.numel() == 1, "input_scale is ", t.scalar_type(), " ",
        t.sizes(), " on ", t.device(), ", expected one Float on cpu");
  const float scale = *t.data<const float>();
  check(scale >= 0.0f && scale < std::numeric_limits<float>::infinity(), "input_scale is ", scale,
        "; it must be 0 or positive");
  return scale;
}

Operand::Operand(const LinearOperand& linear, int64_t rows, int64_t in_features, ScalarType dtype) {
  const Array& weight = linear.weight;
  check(weight.is_cpu(), "weight is on ", weight.device(), ", expected cpu");
  check(weight.dim() == 2 && weight.size(1) == in_features, "weight has shape ", weight.sizes(),
        ", expected (out_features, ", in_features, ")");
  const std::optional<PackedOnly> only = packed_only(weight);
  const bool is_int8 = only.has_value() ? only->format == DType::kInt8 : weight.scalar_type() == ScalarType::Char;
  const bool has_scale = linear.weight_scale != nullptr && linear.weight_scale->defined();
  check(is_int8 == has_scale, "weight is ", weight.scalar_type(), " but weight_scale is ", has_scale ? "given" : "None",
        ": int8 weights have a scale, others have none");
  check(!is_int8 || in_features <= kMostInt8Columns, "an int8 weight has ", in_features, " columns; sums of more than ",
        kMostInt8Columns, " do not fit into int32: keep the layer in floating point");
  const int64_t out_features = weight.size(0);
  target.bias_dtype = DType::kFloat32;
  if (linear.bias != nullptr && linear.bias->defined()) {
    const ScalarType type = linear.bias->scalar_type();
    check(type == ScalarType::Float || type == ScalarType::BFloat16, "bias is ", type, ", expected Float or BFloat16");
    target.bias = checked("bias", *linear.bias, {out_features}, type, bias_copy).data<const void>();
    target.bias_dtype = dtype_of(*linear.bias);
  }
  const float* scale = nullptr;
  if (has_scale) {
    scale = checked("weight_scale", *linear.weight_scale, {out_features}, ScalarType::Float, scale_copy).data<float>();
  }
  const DType format = is_int8 ? DType::kInt8 : format_for(dtype);
  target.weight = {nullptr, format, out_features, in_features, nullptr, scale, input_scale_of(linear)};
  if (only.has_value()) {
    check(has_products(), "this weight was packed for another instruction set than the one in use");
    check(only->format == format, kPackedOnly);
    target.weight.packed = only->panels;
    target.weight.channel_offset = only->channel_offset;
    target.weight.residuals = only->residuals;
    return;
  }
  if (!has_products()) {
    source = with_whole_lines(weight);
    target.weight.source = pack_args(source, format);
    return;
  }
  if (!is_int8 && packs_on_its_way(rows, linear.comparison) && has_whole_lines(weight)) {
    source = weight;
    target.weight.source = pack_args(source, format);
    return;
  }
  // int8's panels come with sums of their channels, which take longer than the packing.
  const bool may_keep = is_int8 || !packs_for_itself(rows);
  auto kept = packed_weight(weight, format, linear.version, linear.comparison, may_keep);
  if (!kept.has_value()) {
    panels = packed_once(weight, format);
    target.weight.packed = panels.data<char>();
    return;
  }
  packed = std::move(*kept);
  target.weight.packed = packed.panels->data();
  if (is_int8) target.weight.channel_offset = reinterpret_cast<const int32_t*>(packed.channel_offsets->data());
  if (packed.residuals != nullptr) target.weight.residuals = residuals_in(packed.residuals->data(), out_features);
}

void Operand::write_to(const Array& out, const Array& pre, Activation activation) {
  target.out = out.data();
  target.out_stride = out.size(1);
  target.pre = pre.data<void>();
  target.pre_stride = out.size(1);
  target.activation = activation;
}

Array with_whole_lines(const Array& weight) { return has_whole_lines(weight) ? weight : contiguous(weight); }

Operand transposed(const Array& weight_, int64_t rows, int64_t in_features, ScalarType dtype) {
  const Array weight = with_whole_lines(weight_);
  // Forward, which had as many rows, has packed the weight for itself, and so must this; or it has compared all of the
  // weight, and where that differed, this copy is old, too.
  const Comparison of_call = comparison_of_call();
  const bool packs = packs_on_its_way(rows, of_call) || packs_for_itself(rows);
  const Comparison comparison = packs ? of_call : Comparison::kShare;
  return Operand({weight.t(), nullptr, nullptr, nullptr, version_of(weight), comparison}, rows, in_features, dtype);
}

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

void sum_columns(const Array& x, const Array& sums) {
  parallel_for(0, num_panels(x.size(1)), 1, [&](int64_t begin, int64_t end) {
    column_sums(rows_of(x), x.size(0), sums.data(), dtype_of(sums), begin * kPanel, std::min(end * kPanel, x.size(1)));
  });
}

Array pack_tokens(const Array& x_, DType format, const Array& sums) {
  const Array x = x_.stride(1) == 1 ? x_ : contiguous(x_);
  if (!has_products()) {
    if (sums.defined()) sum_columns(x, sums);
    return x;
  }
  const int64_t panels = num_panels(x.size(1));
  const Array packed = workspace({panels * panel_bytes(format, x.size(0))}, ScalarType::Byte);
  const PackArgs args{
      x.data(), dtype_of(x), x.size(1), x.size(0), 1, x.stride(0), format, static_cast<char*>(packed.data()), nullptr};
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    pack_panels(args, begin, end);
    for (int64_t p = begin; sums.defined() && p < end; ++p) {
      panel_sums(args.packed + p * panel_bytes(format, x.size(0)), format, x.size(0),
                 sums.data<char>() + p * kPanel * sums.element_size(), dtype_of(sums),
                 std::min(kPanel, x.size(1) - p * kPanel));
    }
  });
  return packed;
}

Array weight_gradient(const Array& dout, const Array& x, DType format, int64_t tokens, const Array& weight) {
  const auto [dweight, squares] = new_gradient(weight);
  if (!has_products()) {
    weight_gradient_by_torch(dout, x, dweight);
    return dweight;
  }
  const int64_t blocks = num_panels(weight.size(0)) * num_panels(weight.size(1));
  if (weight.scalar_type() == ScalarType::Float) squares->resize(static_cast<size_t>(blocks));
  const GemmTransposedArgs args{static_cast<const char*>(dout.data()),
                                static_cast<const char*>(x.data()),
                                format,
                                tokens,
                                weight.size(0),
                                weight.size(1),
                                dweight.data(),
                                dtype_of(weight),
                                squares->empty() ? nullptr : squares->data()};
  parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) { gemm_transposed(args, begin, end); });
  return dweight;
}

}  // namespace fastbert
