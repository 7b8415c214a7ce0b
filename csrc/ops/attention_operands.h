// What every kind of attention reads, checked, and how its tasks are run.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "../cpu/attention.h"
#include "attention_options.h"
#include "attention_plan.h"
#include "dropout.h"
#include "tensors.h"

namespace fastbert {

template <typename T>
HeadRows<T> head_rows(const Array& t) {
  return {t.data<T>(), t.stride(0), t.stride(1)};
}

// The tensor itself where its rows' elements are neighbours, as they are in a slice of a fused projection.
Array with_rows(const char* name, const Array& t, const Shape& sizes, const Array& like);

// Each thread takes the next task when it is done with one: sequences differ in length by far.
template <typename F>
void run_plan(const AttentionPlan& plan, const F& run) {
  std::atomic<size_t> next{0};
  parallel_for(0, plan.workers, 1, [&](int64_t, int64_t) {
    for (size_t i = next++; i < plan.tasks.size(); i = next++) run(plan.tasks[i]);
  });
}

struct Operands {
  Array q, k, v, cos, sin;
  std::vector<int64_t> offsets;
  SeenKeys seen;
  int64_t total_tokens, num_heads, num_kv_heads;
  const AttentionOptions* options;
  Dropout dropout;

  int64_t group() const { return num_kv_heads > 0 ? num_heads / num_kv_heads : 1; }
};

Operands checked_operands(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                          const AttentionOptions& options, const Dropout& dropout);

template <typename T>
AttentionInputs<T> inputs(const Operands& operands) {
  RotaryTables rotary{};
  if (operands.cos.defined()) {
    rotary = {operands.cos.data<const float>(), operands.sin.data<const float>(), operands.cos.stride(0),
              operands.sin.stride(0),           operands.options->interleaved,    operands.options->by_token};
  }
  return {head_rows<const T>(operands.q),
          head_rows<const T>(operands.k),
          head_rows<const T>(operands.v),
          operands.num_heads,
          operands.group(),
          operands.q.size(2),
          static_cast<float>(operands.options->softmax_scale),
          operands.dropout,
          rotary,
          operands.seen.begin.data(),
          operands.seen.end.data()};
}

}  // namespace fastbert
