#include "attention.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "../cpu/attention.h"
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
Array with_rows(const char* name, const Array& t, const Array& like) {
  check(t.is_cpu(), name, " is on ", t.device(), ", expected cpu");
  check(t.sizes() == like.sizes(), name, " has shape ", t.sizes(), ", expected ", like.sizes());
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

// Work is measured in scores; packing a head costs about as much as this many a token.
constexpr int64_t kPackingScores = 64;
// A task of 10 to 20 microseconds: nothing is cut smaller, and a thread that has less to do is not woken.
constexpr int64_t kSmallestTask = 32768;

struct Plan {
  std::vector<AttentionTask> tasks;
  int64_t workers;
};

int64_t scores_of(int64_t n) { return n * (n + kPackingScores); }

// Heads together where sequences are short, one by one where they are long. Where one head of a sequence is more than
// its share of a thread's work, its queries are cut apart (forward), or its queries for dq and its keys for dk and dv,
// which computes the scores twice (backward).
Plan make_plan(const std::vector<int64_t>& offsets, int64_t num_heads, bool is_backward) {
  int64_t total = 0;
  for (size_t i = 1; i < offsets.size(); ++i) total += scores_of(offsets[i] - offsets[i - 1]) * num_heads;
  if (total == 0) return {{}, 0};
  const int64_t threads = num_threads();
  const int64_t target = threads == 1 ? total : std::max(kSmallestTask, total / (8 * threads));
  const int64_t largest = is_backward ? std::max(target, total / threads) : target;
  Plan plan;
  std::vector<AttentionTask>& tasks = plan.tasks;
  for (size_t i = 1; i < offsets.size(); ++i) {
    const int64_t first = offsets[i - 1], n = offsets[i] - first, scores = scores_of(n);
    if (n == 0) continue;
    const int64_t heads = std::clamp<int64_t>(target / scores, 1, num_heads);
    const int64_t pieces = scores > largest ? (scores + target - 1) / target : 1;
    const int64_t rows = (n + pieces * kAttentionBlock - 1) / (pieces * kAttentionBlock) * kAttentionBlock;
    for (int64_t head = 0; head < num_heads; head += heads) {
      const int64_t head_end = std::min(num_heads, head + heads);
      if (rows >= n) {
        tasks.push_back({first, n, head, head_end, 0, n, 0, n});
        continue;
      }
      for (int64_t row = 0; row < n; row += rows) {
        tasks.push_back({first, n, head, head_end, row, std::min(n, row + rows), 0, 0});
        if (is_backward) tasks.push_back({first, n, head, head_end, 0, 0, row, std::min(n, row + rows)});
      }
    }
  }
  plan.workers = std::min({threads, static_cast<int64_t>(tasks.size()), 1 + total / kSmallestTask});
  return plan;
}

// Each thread takes the next task when it is done with one: sequences differ in length by far.
template <typename F>
void run_tasks(const Plan& plan, const F& run) {
  std::atomic<size_t> next{0};
  parallel_for(0, plan.workers, 1, [&](int64_t, int64_t) {
    for (size_t i = next++; i < plan.tasks.size(); i = next++) run(plan.tasks[i]);
  });
}

template <typename T>
AttentionInputs<T> inputs(const Array& q, const Array& k, const Array& v, double softmax_scale,
                          const Dropout& dropout) {
  return {head_rows<const T>(q),
          head_rows<const T>(k),
          head_rows<const T>(v),
          q.size(1),
          q.size(2),
          static_cast<float>(softmax_scale),
          dropout};
}

void check_form(const Array& q, const Array& k, const AttentionForm& form) {
  check(form.window_left < 0 && form.window_right < 0, "windows are not implemented");
  check(!form.cos.defined(), "rotary embedding is not implemented");
  check(k.sizes() == q.sizes(), "grouped heads are not implemented");
}

void check_q(const Array& q) {
  check(q.dim() == 3, "q has shape ", q.sizes(), ", expected (total_tokens, num_heads, head_dim)");
  check(q.size(2) <= kLargestHeadDim, "head_dim is ", q.size(2), ", expected at most ", kLargestHeadDim);
}

}  // namespace

namespace {

// `stats` is empty, or undefined, where it is not wanted.
void run_forward(const Array& q_, const Array& k_, const Array& v_, const Array& cu_seqlens, const Dropout& dropout,
                 double softmax_scale, const Array& out, const Array& stats) {
  const Array q = with_rows("q", q_, q_), k = with_rows("k", k_, q_), v = with_rows("v", v_, q_);
  const int64_t total_tokens = q.size(0), num_heads = q.size(1);
  const std::vector<int64_t> offsets = checked_offsets(cu_seqlens, total_tokens);
  const bool has_stats = stats.defined() && stats.numel() > 0;
  if (const int64_t slack = total_tokens - offsets.back(); slack > 0) {
    zero(out.narrow(0, offsets.back(), slack));
    if (has_stats) zero(stats.narrow(2, offsets.back(), slack));
  }
  for_dtype(q.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const AttentionFwd<T> args{inputs<T>(q, k, v, softmax_scale, dropout), head_rows<T>(out),
                               has_stats ? stats.data<float>() : nullptr, total_tokens};
    run_tasks(make_plan(offsets, num_heads, false), [&](const AttentionTask& task) { attention_fwd(args, task); });
  });
}

Array empty_stats(const Array& q, bool wanted) {
  return empty({wanted ? 2 : 0, q.size(1), q.size(0)}, ScalarType::Float);
}

}  // namespace

std::tuple<Array, Array> attention_fwd_cpu(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                                           const OptionalArray& philox, const AttentionForm& form, double dropout_p,
                                           bool return_stats) {
  check_q(q);
  check_form(q, k, form);
  const Array out = empty_like(q), stats = empty_stats(q, return_stats);
  run_forward(q, k, v, cu_seqlens, make_dropout(dropout_p, philox), form.softmax_scale, out, stats);
  return {out, stats};
}

void attention_rows(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens, const AttentionForm& form,
                    const Array& out) {
  check_q(q);
  check_form(q, k, form);
  run_forward(q, k, v, cu_seqlens, make_dropout(0.0, {}), form.softmax_scale, out, Array());
}

void attention_gradients(const Array& dout_, const Array& q_, const Array& k_, const Array& v_, const Array& out_,
                         const Array& softmax_stats, const Array& cu_seqlens, const OptionalArray& philox,
                         const AttentionForm& form, double dropout_p, const Array& dq, const Array& dk,
                         const Array& dv) {
  check_q(q_);
  check_form(q_, k_, form);
  const Array q = with_rows("q", q_, q_), k = with_rows("k", k_, q_), v = with_rows("v", v_, q_);
  const Array out = with_rows("out", out_, q_), dout = with_rows("dout", dout_, q_);
  const int64_t total_tokens = q.size(0), num_heads = q.size(1);
  const Array stats = checked("softmax_stats", softmax_stats, {2, num_heads, total_tokens}, ScalarType::Float);
  const std::vector<int64_t> offsets = checked_offsets(cu_seqlens, total_tokens);
  const Dropout dropout = make_dropout(dropout_p, philox);

  for (const Array& t : {dq, dk, dv}) zero(t.narrow(0, offsets.back(), total_tokens - offsets.back()));
  for_dtype(q.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const AttentionBwd<T> args{inputs<T>(q, k, v, form.softmax_scale, dropout),
                               head_rows<const T>(out),
                               head_rows<const T>(dout),
                               stats.data<const float>(),
                               head_rows<T>(dq),
                               head_rows<T>(dk),
                               head_rows<T>(dv),
                               total_tokens};
    run_tasks(make_plan(offsets, num_heads, true), [&](const AttentionTask& task) { attention_bwd(args, task); });
  });
}

std::tuple<Array, Array, Array> attention_bwd_cpu(const Array& dout, const Array& q, const Array& k, const Array& v,
                                                  const Array& out, const Array& softmax_stats, const Array& cu_seqlens,
                                                  const OptionalArray& philox, const AttentionForm& form,
                                                  double dropout_p) {
  check_q(q);
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
