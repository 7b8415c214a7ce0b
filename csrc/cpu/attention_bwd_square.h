// From the scores of one square to their gradients; included by attention_bwd_heads.h, for one ISA.

// The probabilities of kWidth keys, and the derivative by their scores.
struct Gradient {
  Floats probs, dscores;
};

// The probabilities of kWidth keys before dropout.
template <typename E, bool kHasWindow>
FASTBERT_SIMD Floats probs_of(const float* scores, Floats scale, const BwdMemory& memory, int64_t row, int64_t column,
                              int64_t real, const Window& window) {
  Floats e;
  if constexpr (kHasWindow) {
    const int64_t first = window.key + column;
    if (window.end[row] <= first || window.begin[row] >= first + kWidth) return set1(0.0f);
    e = exp_seen<E>(scores, set1(memory.row_max[row]), scale, window.begin[row] - first, window.end[row] - first);
  } else {
    e = exp_score<E>(scores, set1(memory.row_max[row]), scale, real);
  }
  return mul(e, set1(memory.inverse_sum[row]));
}

// Of a row all of whose keys are in the square: P in the place of its scores, dP with dropout in its own, and delta,
// the sum of the very products that it is taken from, so that dS sums up to 0. What rowsum(dO O) is off by goes into
// every key's gradient, and adds up over them. In fp32 a second sum finds what the first has lost, and dP is left less
// the first one: where values have a mean or one key dominates, dP and delta share their leading digits.
template <typename E, bool kHasWindow>
FASTBERT_SIMD float whole_row(float* scores, float* dprobs, Floats scale, const BwdMemory& memory, int64_t row,
                              const float* multipliers, int64_t keys, const Window& window) {
  Floats total = set1(0.0f);
  for (int64_t c = 0; c < keys; c += kWidth) {
    const Floats p = probs_of<E, kHasWindow>(scores + c, scale, memory, row, c, keys - c, window);
    Floats dp = load(dprobs + c);
    if (multipliers != nullptr) dp = mul(dp, load(multipliers + c));
    store(scores + c, p);
    store(dprobs + c, dp);
    total = fma(p, dp, total);
  }
  if constexpr (sizeof(E) == 2) return sum(total);
  const Floats first = set1(sum(total));
  Floats rest = set1(0.0f);
  for (int64_t c = 0; c < keys; c += kWidth) {
    const Floats dp = sub(load(dprobs + c), first);
    store(dprobs + c, dp);
    rest = fma(load(scores + c), dp, rest);
  }
  return sum(rest);
}

// kIsWhole: of what whole_row has made.
template <typename E, bool kHasWindow, bool kIsWhole>
FASTBERT_SIMD Gradient gradient_of(const float* scores, const float* dprobs, Floats scale, const BwdMemory& memory,
                                   int64_t row, const float* multipliers, int64_t column, int64_t real,
                                   const Window& window) {
  Floats p, dp = load(dprobs);
  if constexpr (kIsWhole) {
    p = load(scores);
  } else {
    p = probs_of<E, kHasWindow>(scores, scale, memory, row, column, real, window);
    if (multipliers != nullptr) dp = mul(dp, load(multipliers));
  }
  const Floats dscores = mul(p, sub(dp, set1(memory.delta[row])));
  return {multipliers == nullptr ? p : mul(p, load(multipliers)), dscores};
}

// Scores and dprobs of one square become the left-hand operands of the three products to come. kIsWhole: its rows have
// all of their keys there, and no delta yet.
template <typename E, bool kHasWindow, bool kIsWhole>
void square_gradients(const BwdMemory& memory, const DropoutMask& mask, bool has_dropout, uint64_t counter,
                      uint64_t counters_per_query, int64_t query, int64_t rows, int64_t keys, float softmax_scale,
                      const Window& window) {
  const Floats scale = set1(softmax_scale * kLog2e);
  for (int64_t r = 0; r < rows; r += kPerStep<E>) {
    const int64_t pair_rows = std::min(kPerStep<E>, rows - r);
    const float* multiplier[kPerStep<E>] = {};
    for (int64_t i = 0; has_dropout && i < pair_rows; ++i) {
      const uint64_t first = counter + static_cast<uint64_t>(r + i) * counters_per_query;
      multiplier[i] = draw_in_turn(mask, first, counters_per_query, r + i, keys, kBlock, memory.multiplier);
    }
    for (int64_t i = 0; kIsWhole && i < pair_rows; ++i) {
      const int64_t at = (r + i) * kPanel, row = query + r + i;
      memory.delta[row] = whole_row<E, kHasWindow>(memory.scores + at, memory.dprobs + at, scale, memory, row,
                                                   multiplier[i], keys, window);
    }
    for (int64_t c = 0; c < keys; c += kWidth) {
      const int64_t at = r * kPanel + c, step_at = (r / kPerStep<E> * kPanel + c) * 4;
      const Gradient first =
          gradient_of<E, kHasWindow, kIsWhole>(memory.scores + at, memory.dprobs + at, scale, memory, query + r,
                                               has_dropout ? multiplier[0] + c : nullptr, c, keys - c, window);
#if defined(FASTBERT_BF16)
      if constexpr (sizeof(E) == 2) {
        Gradient second{set1(0.0f), set1(0.0f)};
        if (pair_rows == 2) {
          second = gradient_of<E, kHasWindow, kIsWhole>(memory.scores + at + kPanel, memory.dprobs + at + kPanel, scale,
                                                        memory, query + r + 1,
                                                        has_dropout ? multiplier[1] + c : nullptr, c, keys - c, window);
        }
        auto* dscores = reinterpret_cast<BFloat16*>(memory.dscores);
        store(reinterpret_cast<int32_t*>(memory.probs_pairs + step_at), pair_bf16(first.probs, second.probs));
        store(reinterpret_cast<int32_t*>(memory.dscores_pairs + step_at), pair_bf16(first.dscores, second.dscores));
        store(dscores + at, first.dscores);
        store(dscores + at + kPanel, second.dscores);
        continue;
      }
#endif
      store(reinterpret_cast<float*>(memory.probs_pairs + step_at), first.probs);
      store(reinterpret_cast<float*>(memory.dscores_pairs + step_at), first.dscores);
    }
    // Zeros up to whole steps of keys: at most one vector more, where a group of steps has two.
    if constexpr (kStepGroup<E> * kPerStep<E> > kWidth) {
      const int64_t end = (keys + kWidth - 1) / kWidth * kWidth;
      if (end % (kStepGroup<E> * kPerStep<E>) == 0) continue;
      E* dscores = reinterpret_cast<E*>(memory.dscores) + r * kPanel + end;
      store(dscores, set1(0.0f));
      store(dscores + kPanel, set1(0.0f));
    }
  }
  // And of queries.
  const int64_t filled = steps_of<E>(rows) * kStepBytes;
  const auto rest = static_cast<size_t>(whole_steps<E>(rows) * kStepBytes - filled);
  std::memset(memory.probs_pairs + filled, 0, rest);
  std::memset(memory.dscores_pairs + filled, 0, rest);
}
