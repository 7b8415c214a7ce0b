#include "attention.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "../cpu/attention.h"
#include "attention_plan.h"
#include "dropout.h"
#include "tensors.h"

namespace fastbert {
namespace {

constexpr int64_t kLargestHeadDim = 256;

template <typename T>
HeadRows<T> head_rows(const Array& t) {
  return {t.data<T>(), t.stride(0), t.stride(1)};
}

// The tensor itself where its rows' elements are neighbours, as they are in a slice of a fused projection.
Array with_rows(const char* name, const Array& t, const Shape& sizes, const Array& like) {
  check(t.is_cpu(), name, " is on ", t.device(), ", expected cpu");
  check(t.sizes() == sizes, name, " has shape ", t.sizes(), ", expected ", sizes);
  check(t.scalar_type() == like.scalar_type(), name, " is ", t.scalar_type(), ", expected ", like.scalar_type());
  return t.size(2) <= 1 || t.stride(2) == 1 ? t : contiguous(t);
}

std::vector<int64_t> checked_offsets(const Array& cu_seqlens, int64_t total_tokens) {
  check(cu_seqlens.dim() == 1 && cu_seqlens.size(0) > 0, "cu_seqlens has shape ", cu_seqlens.sizes(),
        ", expected (batch + 1,)");
  const Array words = checked("cu_seqlens", cu_seqlens, cu_seqlens.sizes(), ScalarType::Int);
  const auto* from = words.data<const int32_t>();
  const std::vector<int64_t> offsets(from, from + words.size(0));
  check(offsets.front() == 0, "cu_seqlens[0] is ", offsets.front(), ", expected 0");
  for (size_t i = 1; i < offsets.size(); ++i) {
    check(offsets[i] >= offsets[i - 1], "cu_seqlens[", i, "] is ", offsets[i], ", below cu_seqlens[", i - 1,
          "] which is ", offsets[i - 1]);
  }
  check(offsets.back() <= total_tokens, "cu_seqlens[-1] is ", offsets.back(), ", above total_tokens, which is ",
        total_tokens);
  return offsets;
}

// Each thread takes the next task when it is done with one: sequences differ in length by far.
template <typename F>
void run_tasks(const AttentionPlan& plan, const F& run) {
  std::atomic<size_t> next{0};
  parallel_for(0, plan.workers, 1, [&](int64_t, int64_t) {
    for (size_t i = next++; i < plan.tasks.size(); i = next++) run(plan.tasks[i]);
  });
}

// What forward and backward read, checked.
struct Operands {
  Array q, k, v, cos, sin;
  std::vector<int64_t> offsets;
  SeenKeys seen;
  int64_t total_tokens, num_heads, num_kv_heads;
  const AttentionForm* form;
  Dropout dropout;

  int64_t group() const { return num_kv_heads > 0 ? num_heads / num_kv_heads : 1; }
};

Array checked_table(const char* name, const Array& table, const Operands& operands) {
  const int64_t half = operands.q.size(2) / 2, rows = table.dim() == 2 ? table.size(0) : 0;
  check(operands.q.size(2) % 2 == 0, "head_dim is ", operands.q.size(2), ", which rotary embedding cannot halve");
  check_tensor(name, table, {rows, half}, ScalarType::Float, cpu());
  if (operands.form->by_token) {
    check(rows == operands.total_tokens, name, " has ", rows, " rows, expected one for each of ", operands.total_tokens,
          " tokens");
  }
  for (size_t i = 1; !operands.form->by_token && i < operands.offsets.size(); ++i) {
    const int64_t length = operands.offsets[i] - operands.offsets[i - 1];
    check(rows >= length, name, " has ", rows, " positions, sequence ", i - 1, " has ", length, " tokens");
  }
  return half <= 1 || table.stride(1) == 1 ? table : contiguous(table);
}

Operands checked_operands(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                          const AttentionForm& form, const Dropout& dropout) {
  check(q.dim() == 3, "q has shape ", q.sizes(), ", expected (total_tokens, num_heads, head_dim)");
  check(q.size(2) <= kLargestHeadDim, "head_dim is ", q.size(2), ", expected at most ", kLargestHeadDim);
  check(k.dim() == 3, "k has shape ", k.sizes(), ", expected (total_tokens, num_kv_heads, head_dim)");
  const int64_t num_heads = q.size(1), num_kv_heads = k.size(1);
  check(num_kv_heads > 0 ? num_heads % num_kv_heads == 0 : num_heads == 0, "q has ", num_heads, " heads, which the ",
        num_kv_heads, " of k do not divide");
  Operands operands;
  operands.total_tokens = q.size(0), operands.num_heads = num_heads, operands.num_kv_heads = num_kv_heads;
  operands.form = &form, operands.dropout = dropout;
  const Shape sizes{q.size(0), num_kv_heads, q.size(2)};
  operands.q = with_rows("q", q, q.sizes(), q);
  operands.k = with_rows("k", k, sizes, q);
  operands.v = with_rows("v", v, sizes, q);
  operands.offsets = checked_offsets(cu_seqlens, q.size(0));
  operands.seen = seen_keys(operands.offsets, q.size(0), form);
  if (form.cos.defined()) {
    operands.cos = checked_table("cos", form.cos, operands);
    operands.sin = checked_table("sin", form.sin, operands);
  }
  return operands;
}

template <typename T>
AttentionInputs<T> inputs(const Operands& operands) {
  RotaryTables rotary{};
  if (operands.cos.defined()) {
    rotary = {operands.cos.data<const float>(), operands.sin.data<const float>(), operands.cos.stride(0),
              operands.sin.stride(0),           operands.form->interleaved,       operands.form->by_token};
  }
  return {head_rows<const T>(operands.q),
          head_rows<const T>(operands.k),
          head_rows<const T>(operands.v),
          operands.num_heads,
          operands.group(),
          operands.q.size(2),
          static_cast<float>(operands.form->softmax_scale),
          operands.dropout,
          rotary,
          operands.seen.begin.data(),
          operands.seen.end.data()};
}

// `stats` is empty, or undefined, where it is not wanted.
void run_forward(const Operands& operands, const Array& out, const Array& stats) {
  const int64_t total_tokens = operands.total_tokens, end = operands.offsets.back();
  const bool has_stats = stats.defined() && stats.numel() > 0;
  if (const int64_t slack = total_tokens - end; slack > 0) {
    zero(out.narrow(0, end, slack));
    if (has_stats) zero(stats.narrow(2, end, slack));
  }
  for_dtype(out.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const AttentionFwd<T> args{inputs<T>(operands), head_rows<T>(out), has_stats ? stats.data<float>() : nullptr,
                               total_tokens};
    run_tasks(make_plan(operands.offsets, operands.seen, operands.num_heads, operands.group(), false),
              [&](const AttentionTask& task) { attention_fwd(args, task); });
  });
}

}  // namespace

std::tuple<Array, Array> attention_fwd_cpu(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                                           const OptionalArray& philox, const AttentionForm& form, double dropout_p,
                                           bool return_stats) {
  const Operands operands = checked_operands(q, k, v, cu_seqlens, form, make_dropout(dropout_p, philox));
  const Array out = empty_like(q);
  const Array stats = empty({return_stats ? 2 : 0, q.size(1), q.size(0)}, ScalarType::Float);
  run_forward(operands, out, stats);
  return {out, stats};
}

void attention_rows(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens, const AttentionForm& form,
                    const Array& out) {
  run_forward(checked_operands(q, k, v, cu_seqlens, form, make_dropout(0.0, {})), out, Array());
}

void attention_gradients(const Array& dout_, const Array& q, const Array& k, const Array& v, const Array& out_,
                         const Array& softmax_stats, const Array& cu_seqlens, const OptionalArray& philox,
                         const AttentionForm& form, double dropout_p, const Array& dq, const Array& dk,
                         const Array& dv) {
  const Operands operands = checked_operands(q, k, v, cu_seqlens, form, make_dropout(dropout_p, philox));
  const Array out = with_rows("out", out_, q.sizes(), q), dout = with_rows("dout", dout_, q.sizes(), q);
  const int64_t total_tokens = operands.total_tokens, num_heads = operands.num_heads, end = operands.offsets.back();
  const Array stats = checked("softmax_stats", softmax_stats, {2, num_heads, total_tokens}, ScalarType::Float);

  for (const Array& t : {dq, dk, dv}) zero(t.narrow(0, end, total_tokens - end));
  for_dtype(q.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const AttentionBwd<T> args{
        inputs<T>(operands), head_rows<const T>(out), head_rows<const T>(dout), stats.data<const float>(),
        head_rows<T>(dq),    head_rows<T>(dk),        head_rows<T>(dv),         total_tokens};
    run_tasks(make_plan(operands.offsets, operands.seen, num_heads, operands.group(), true),
              [&](const AttentionTask& task) { attention_bwd(args, task); });
  });
}

std::tuple<Array, Array, Array> attention_bwd_cpu(const Array& dout, const Array& q, const Array& k, const Array& v,
                                                  const Array& out, const Array& softmax_stats, const Array& cu_seqlens,
                                                  const OptionalArray& philox, const AttentionForm& form,
                                                  double dropout_p) {
  const Array dq = empty_like(q), dk = empty_like(k), dv = empty_like(v);
  attention_gradients(dout, q, k, v, out, softmax_stats, cu_seqlens, philox, form, dropout_p, dq, dk, dv);
  return {dq, dk, dv};
}

std::tuple<Array, Array> attention_fwd_operator(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                                                const OptionalArray& philox, const OptionalArray& window_positions,
                                                const OptionalArray& cos, const OptionalArray& sin,
                                                double softmax_scale, double dropout_p, int64_t window_left,
                                                int64_t window_right, bool interleaved, bool by_token,
                                                bool return_stats) {
  return attention_fwd_cpu(
      q, k, v, cu_seqlens, philox,
      {softmax_scale, window_left, window_right, window_positions, cos, sin, interleaved, by_token}, dropout_p,
      return_stats);
}

std::tuple<Array, Array, Array> attention_bwd_operator(const Array& dout, const Array& q, const Array& k,
                                                       const Array& v, const Array& out, const Array& softmax_stats,
                                                       const Array& cu_seqlens, const OptionalArray& philox,
                                                       const OptionalArray& window_positions, const OptionalArray& cos,
                                                       const OptionalArray& sin, double softmax_scale, double dropout_p,
                                                       int64_t window_left, int64_t window_right, bool interleaved,
                                                       bool by_token) {
  return attention_bwd_cpu(
      dout, q, k, v, out, softmax_stats, cu_seqlens, philox,
      {softmax_scale, window_left, window_right, window_positions, cos, sin, interleaved, by_token}, dropout_p);
}

}  // namespace fastbert
