#include "attention.h"

#include "attention_operands.h"

namespace fastbert {
namespace {

// `stats` is empty, or undefined, where it is not wanted.
void run_forward(const Operands& operands, const Array& out, const Array& stats) {
  const int64_t total_tokens = operands.total_tokens, end = operands.offsets.back();
  const bool has_stats = stats.defined() && stats.numel() > 0;
  if (const int64_t padding_rows = total_tokens - end; padding_rows > 0) {
    zero(out.narrow(0, end, padding_rows));
    if (has_stats) zero(stats.narrow(2, end, padding_rows));
  }
  for_dtype(out.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const AttentionFwd<T> args{inputs<T>(operands), head_rows<T>(out), has_stats ? stats.data<float>() : nullptr,
                               total_tokens};
    run_plan(make_plan(operands.offsets, operands.seen, operands.num_heads, operands.group(), false),
             [&](const AttentionTask& task) { attention_fwd(args, task); });
  });
}

}  // namespace

std::tuple<Array, Array> attention_fwd_cpu(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                                           const OptionalArray& philox, const AttentionOptions& options,
                                           double dropout_p, bool return_stats) {
  const Operands operands = checked_operands(q, k, v, cu_seqlens, options, make_dropout(dropout_p, philox));
  const Array out = empty_like(q);
  const Array stats = empty({return_stats ? 2 : 0, q.size(1), q.size(0)}, ScalarType::Float);
  run_forward(operands, out, stats);
  return {out, stats};
}

void attention_rows(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                    const AttentionOptions& options, const Array& out) {
  run_forward(checked_operands(q, k, v, cu_seqlens, options, make_dropout(0.0, {})), out, Array());
}

void attention_gradients(const Array& dout_, const Array& q, const Array& k, const Array& v, const Array& out_,
                         const Array& softmax_stats, const Array& cu_seqlens, const OptionalArray& philox,
                         const AttentionOptions& options, double dropout_p, const Array& dq, const Array& dk,
                         const Array& dv) {
  const Operands operands = checked_operands(q, k, v, cu_seqlens, options, make_dropout(dropout_p, philox));
  const Array out = with_rows("out", out_, q.sizes(), q), dout = with_rows("dout", dout_, q.sizes(), q);
  const int64_t total_tokens = operands.total_tokens, num_heads = operands.num_heads, end = operands.offsets.back();
  const Array stats = checked("softmax_stats", softmax_stats, {2, num_heads, total_tokens}, ScalarType::Float);

  for (const Array& t : {dq, dk, dv}) zero(t.narrow(0, end, total_tokens - end));
  for_dtype(q.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const AttentionBwd<T> args{
        inputs<T>(operands), head_rows<const T>(out), head_rows<const T>(dout), stats.data<const float>(),
        head_rows<T>(dq),    head_rows<T>(dk),        head_rows<T>(dv),         total_tokens};
    run_plan(make_plan(operands.offsets, operands.seen, num_heads, operands.group(), true),
             [&](const AttentionTask& task) { attention_bwd(args, task); });
  });
}

std::tuple<Array, Array, Array> attention_bwd_cpu(const Array& dout, const Array& q, const Array& k, const Array& v,
                                                  const Array& out, const Array& softmax_stats, const Array& cu_seqlens,
                                                  const OptionalArray& philox, const AttentionOptions& options,
                                                  double dropout_p) {
  const Array dq = empty_like(q), dk = empty_like(k), dv = empty_like(v);
  attention_gradients(dout, q, k, v, out, softmax_stats, cu_seqlens, philox, options, dropout_p, dq, dk, dv);
  return {dq, dk, dv};
}

std::tuple<Array, Array> attention_fwd_operator(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                                                const OptionalArray& philox, const OptionalArray& window_positions,
                                                const OptionalArray& num_keys, const OptionalArray& cos,
                                                const OptionalArray& sin, double softmax_scale, double dropout_p,
                                                int64_t window_left, int64_t window_right, bool interleaved,
                                                bool by_token, bool return_stats) {
  return attention_fwd_cpu(
      q, k, v, cu_seqlens, philox,
      {softmax_scale, window_left, window_right, window_positions, num_keys, cos, sin, interleaved, by_token},
      dropout_p, return_stats);
}

std::tuple<Array, Array, Array> attention_bwd_operator(
    const Array& dout, const Array& q, const Array& k, const Array& v, const Array& out, const Array& softmax_stats,
    const Array& cu_seqlens, const OptionalArray& philox, const OptionalArray& window_positions,
    const OptionalArray& num_keys, const OptionalArray& cos, const OptionalArray& sin, double softmax_scale,
    double dropout_p, int64_t window_left, int64_t window_right, bool interleaved, bool by_token) {
  return attention_bwd_cpu(
      dout, q, k, v, out, softmax_stats, cu_seqlens, philox,
      {softmax_scale, window_left, window_right, window_positions, num_keys, cos, sin, interleaved, by_token},
      dropout_p);
}

}  // namespace fastbert
