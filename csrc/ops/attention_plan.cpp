#include "attention_plan.h"

#include <algorithm>

#include "tensors.h"

namespace fastbert {

SeenKeys seen_keys(const std::vector<int64_t>& offsets, int64_t total_tokens, const AttentionOptions& options) {
  SeenKeys seen;
  seen.is_cut.resize(offsets.size());
  const bool has_window = options.window_left >= 0 || options.window_right >= 0;
  if (!has_window && !options.num_keys.defined()) return seen;
  seen.begin.resize(static_cast<size_t>(total_tokens));
  seen.end.resize(static_cast<size_t>(total_tokens));
  const bool has_positions = has_window && options.window_positions.defined();
  const Array words =
      has_positions ? checked("window_positions", options.window_positions, {total_tokens}, ScalarType::Int) : Array();
  const Array counts = checked_if_defined("num_keys", options.num_keys, {static_cast<int64_t>(offsets.size()) - 1},
                                          ScalarType::Int, cpu());
  constexpr int64_t kEndless = int64_t{1} << 32;
  const int64_t left = options.window_left < 0 ? kEndless : std::min(options.window_left, kEndless);
  const int64_t right = options.window_right < 0 ? kEndless : std::min(options.window_right, kEndless);
  for (size_t i = 1; i < offsets.size(); ++i) {
    const int64_t first = offsets[i - 1], n = offsets[i] - first;
    const int64_t keys = counts.defined() ? counts.data<const int32_t>()[i - 1] : n;
    check(keys >= 0 && keys <= n, "num_keys[", i - 1, "] is ", keys, "; the sequence has ", n, " tokens");
    if (n == 0) continue;
    int32_t *begin = seen.begin.data() + first, *end = seen.end.data() + first;
    if (has_positions) {
      const int32_t* position = words.data<const int32_t>() + first;
      for (int64_t t = 1; t < n; ++t) {
        check(position[t] > position[t - 1], "window_positions falls or stands still at token ", first + t,
              "; it must ascend within a sequence");
      }
      int64_t from = 0, to = 0;
      for (int64_t t = 0; t < n; ++t) {
        while (position[from] < position[t] - left) ++from;
        while (to < n && position[to] <= position[t] + right) ++to;
        begin[t] = static_cast<int32_t>(std::min(from, keys)), end[t] = static_cast<int32_t>(std::min(to, keys));
      }
    } else {
      for (int64_t t = 0; t < n; ++t) {
        begin[t] = static_cast<int32_t>(std::clamp<int64_t>(t - left, 0, keys));
        end[t] = static_cast<int32_t>(std::min(keys, t + right + 1));
      }
    }
    seen.is_cut[i] = begin[n - 1] > 0 || end[0] < n;
  }
  return seen;
}

namespace {

// Work is measured in scores; packing a head costs about as much as this many a token.
constexpr int64_t kPackingScores = 64;
// A task of 10 to 20 microseconds: nothing is cut smaller, and a thread that has less to do is not woken.
constexpr int64_t kSmallestTask = 8192;
// The most queries of a forward task with a window: its packed keys, for which it is alone, stay in the second-level
// cache. A multiple of kAttentionBlock.
constexpr int64_t kWindowQueries = 1536;

// Of a head of sequence i.
int64_t scores_of(const std::vector<int64_t>& offsets, const SeenKeys& seen, size_t i) {
  const int64_t first = offsets[i - 1], n = offsets[i] - first;
  if (!seen.is_cut[i]) return n * (n + kPackingScores);
  int64_t scores = n * kPackingScores;
  for (int64_t row = 0; row < n; row += kAttentionBlock) {
    const int64_t rows = std::min(kAttentionBlock, n - row);
    const auto at = static_cast<size_t>(first + row), last = static_cast<size_t>(first + row + rows - 1);
    scores += rows * (seen.end[last] - seen.begin[at]);
  }
  return scores;
}

}  // namespace

// Heads together where sequences are short, one by one where they are long, and those that share keys together where
// that is possible. Where one head of a sequence is more than its share of a thread's work, its queries are cut apart
// (forward), or its queries for dq and its keys for dk and dv, which computes the scores twice (backward).
AttentionPlan make_plan(const std::vector<int64_t>& offsets, const SeenKeys& seen, int64_t num_heads, int64_t group,
                        bool is_backward) {
  std::vector<int64_t> scores_of_sequence(offsets.size());
  int64_t total = 0;
  for (size_t i = 1; i < offsets.size(); ++i) {
    scores_of_sequence[i] = scores_of(offsets, seen, i);
    total += scores_of_sequence[i] * num_heads;
  }
  if (total == 0) return {{}, 0};
  const int64_t threads = num_threads();
  const int64_t target = threads == 1 ? total : std::max(kSmallestTask, total / (8 * threads));
  const int64_t largest = is_backward ? std::max(target, total / threads) : target;
  AttentionPlan plan;
  std::vector<AttentionTask>& tasks = plan.tasks;
  for (size_t i = 1; i < offsets.size(); ++i) {
    const int64_t first = offsets[i - 1], n = offsets[i] - first;
    if (n == 0) continue;
    const bool has_window = seen.is_cut[i];
    const int64_t unit = is_backward ? group : 1, scores = scores_of_sequence[i] * unit;
    int64_t heads = std::clamp<int64_t>(target / scores * unit, unit, num_heads);
    if (heads > group) heads -= heads % group;
    const int64_t pieces = scores > largest ? (scores + target - 1) / target : 1;
    int64_t rows = (n + pieces * kAttentionBlock - 1) / (pieces * kAttentionBlock) * kAttentionBlock;
    if (has_window && !is_backward) rows = std::min(rows, kWindowQueries);
    for (int64_t head = 0; head < num_heads; head += heads) {
      const int64_t head_end = std::min(num_heads, head + heads);
      if (rows >= n) {
        tasks.push_back({first, n, has_window, head, head_end, 0, n, 0, n});
        continue;
      }
      for (int64_t row = 0; row < n; row += rows) {
        const int64_t end = std::min(n, row + rows);
        tasks.push_back({first, n, has_window, head, head_end, row, end, 0, 0});
        if (is_backward) tasks.push_back({first, n, has_window, head, head_end, 0, 0, row, end});
      }
    }
  }
  plan.workers = std::min({threads, static_cast<int64_t>(tasks.size()), 1 + total / kSmallestTask});
  return plan;
}

}  // namespace fastbert
