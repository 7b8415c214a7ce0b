// Forward attention for one ISA; included by attention_fwd.cpp through foreach_isa.h.
#include "attention_pack.h"

// Keys are taken in blocks whose scores and packed operands stay in the second-level cache; a longer row rescales what
// it has summed when a later block holds a larger score (Milakov & Gimelshein 2018, "Online normalizer calculation for
// softmax", algorithm 3). AMX, whose products take less time than the way of the scores through the caches, has blocks
// that nearly stay in the first.
#if defined(FASTBERT_AMX)
constexpr int64_t kQueryRows = 32, kKeyBlock = 256;
#else
constexpr int64_t kQueryRows = 48, kKeyBlock = 1024;
#endif

struct FwdMemory {
  char *k_columns, *v_rows;  // packed, all keys
  float* scores;             // kQueryRows rows by one block of keys
  char *probs, *q_copy;      // the same; q_copy where rows are no whole steps
  char* sums;                // kQueryRows rows of the output
  float* multiplier;         // null without dropout
  int64_t probs_stride;      // bytes
};

// What is known of the rows of a block after some of their keys: the top score (the smallest, if softmax_scale is
// negative), the sum of exp(softmax_scale * (score - top)), and what earlier sums were multiplied by when top changed.
struct RowStates {
  alignas(64) float top[kQueryRows], sum[kQueryRows], correction[kQueryRows];
};

// Probabilities of one row, and what is to be summed of them: all before dropout.
template <typename E, bool kHasDropout>
FASTBERT_SIMD Floats exp_row(const float* scores, int64_t keys, Floats top, Floats scale, const float* multiplier,
                             E* probs) {
  Floats total = set1(0.0f);
  for (int64_t key = 0; key < keys; key += kPanel, scores += kQueryRows * kPanel) {
    const int64_t columns = std::min(kPanel, keys - key);
    for (int64_t i = 0; i < columns; i += kWidth) {
      Floats x = exp_score<E>(scores + i, top, scale, columns - i);
      total = add(total, x);
      if constexpr (kHasDropout) x = mul(x, load(multiplier + key + i));
      store(probs + key + i, x);
    }
  }
  // Zeros up to whole steps: at most one vector more, where a group of steps has two.
  if constexpr (kStepGroup<E> * kPerStep<E> > kWidth) {
    const int64_t end = (keys + kWidth - 1) / kWidth * kWidth;
    if (end % (kStepGroup<E> * kPerStep<E>) != 0) store(probs + end, set1(0.0f));
  }
  return total;
}

// Scores (panels, kQueryRows, kPanel) of up to kWidth rows from `first` on to probabilities that lack their division by
// the sum; `scale` is softmax_scale * log2(e). Row r's dropout counters begin at counter + r * counters_per_query.
template <typename E>
void softmax_rows(const FwdMemory& m, int64_t first, int64_t rows, int64_t keys, float scale, const Dropout& dropout,
                  uint64_t counter, uint64_t counters_per_query, bool is_first, RowStates& states) {
  constexpr int64_t kVectors = kPanel / kWidth, kPanelStride = kQueryRows * kPanel;
  alignas(64) float lanes[kWidth][kWidth];
  const int64_t whole = keys / kPanel;
  const Floats sign = set1(scale < 0.0f ? -1.0f : 1.0f), scales = set1(scale);
  const float* scores = m.scores + first * kPanel;
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = scores + r * kPanel;
    Floats top[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) top[v] = set1(-__builtin_inff());
    for (int64_t p = 0; p < whole; ++p) {
      for (int64_t v = 0; v < kVectors; ++v) {
        top[v] = max(top[v], mul(load(row + p * kPanelStride + v * kWidth), sign));
      }
    }
    for (int64_t i = 0; i < keys % kPanel; i += kWidth) {
      top[0] = max(top[0], fma(load(row + whole * kPanelStride + i), sign, beyond(keys % kPanel - i)));
    }
    for (int64_t v = 1; v < kVectors; ++v) top[0] = max(top[0], top[v]);
    store(lanes[r], top[0]);
  }
  Floats tops = reduce_rows<Max>(lanes), correction = set1(0.0f), sums = set1(0.0f);
  if (!is_first) {
    const Floats before = load(states.top + first);
    tops = max(mul(before, sign), tops);
    correction = exp2<true>(mul(sub(before, mul(tops, sign)), scales));
    sums = load(states.sum + first);
  }
  store(states.top + first, mul(tops, sign));
  store(states.correction + first, correction);

  for (int64_t r = 0; r < rows; ++r) {
    const float* row = scores + r * kPanel;
    E* probs = reinterpret_cast<E*>(m.probs + (first + r) * m.probs_stride);
    const Floats top = set1(states.top[first + r]);
    Floats total;
    if (m.multiplier == nullptr) {
      total = exp_row<E, false>(row, keys, top, scales, nullptr, probs);
    } else {
      fill_dropout_from(dropout, counter + static_cast<uint64_t>(r) * counters_per_query, drawn_keys<E>(keys),
                        m.multiplier);
      total = exp_row<E, true>(row, keys, top, scales, m.multiplier, probs);
    }
    store(lanes[r], total);
  }
  store(states.sum + first, fma(sums, correction, reduce_rows<Sum>(lanes)));
}

template <typename E, typename T>
FwdMemory lay_out(Carver& carver, const AttentionInputs<T>& in, int64_t n, int64_t block) {
  const int64_t dim_panels = (in.head_dim + kPanel - 1) / kPanel, dim_steps = whole_steps<E>(in.head_dim);
  FwdMemory memory;
  memory.k_columns = carver.take((n + kPanel - 1) / kPanel * dim_steps * kStepBytes);
  memory.v_rows = carver.take(dim_panels * whole_steps<E>(n) * kStepBytes);
  memory.scores = carver.take_floats(block * kQueryRows);
  // A line more than the keys need: rows 1 KB apart would compete for the same sets of the first-level cache.
  memory.probs_stride = block * static_cast<int64_t>(sizeof(E)) + 64;
  memory.probs = carver.take(kQueryRows * memory.probs_stride);
  memory.q_copy = carver.take(lies_ready<E, T>(in.head_dim) ? 0 : kQueryRows * dim_steps * 4);
  memory.sums = carver.take(dim_panels * kQueryRows * kStepBytes);
  memory.multiplier = in.dropout.p > 0.0 ? carver.take_floats(block) : nullptr;
  return memory;
}

template <typename E, typename T>
void attention_fwd_heads(const AttentionFwd<T>& args, const AttentionTask& task) {
  using Dot = typename DotOf<E>::Dot;
  static thread_local Scratch scratch;
  const AttentionInputs<T>& in = args.in;
  const int64_t n = task.length, d = in.head_dim, dim_panels = (d + kPanel - 1) / kPanel;
  const int64_t dim_steps = whole_steps<E>(d), key_steps = whole_steps<E>(n);
  const int64_t block = std::min((n + kPanel - 1) / kPanel * kPanel, kKeyBlock);
  Carver counting{nullptr};
  lay_out<E>(counting, in, n, block);
  Carver carver{scratch.get(counting.size)};
  const FwdMemory m = lay_out<E>(carver, in, n, block);
  const float scale = in.softmax_scale * kLog2e;
  AmxTiles tiles;

  for (int64_t head = task.head_begin; head < task.head_end; ++head) {
    pack_columns<E>(in.k.at(task.first_token, head), in.k.token_stride, n, d, m.k_columns);
    pack_rows<E>(in.v.at(task.first_token, head), in.v.token_stride, n, d, key_steps, m.v_rows);
    for (int64_t query = task.query_begin; query < task.query_end; query += kQueryRows) {
      const int64_t rows = std::min(kQueryRows, task.query_end - query), token = task.first_token + query;
      const Left q = left_rows<E>(in.q.at(token, head), in.q.token_stride, rows, d, m.q_copy);
      RowStates states;
      for (int64_t key = 0; key < n; key += block) {
        const int64_t keys = std::min(block, n - key);
        for (int64_t p = 0; p * kPanel < keys; ++p) {
          product<Dot>(tiles, rows, q.data, q.stride, m.k_columns + (key / kPanel + p) * dim_steps * kStepBytes,
                       dim_steps, std::min(kPanel, keys - p * kPanel), false,
                       reinterpret_cast<char*>(m.scores + p * kQueryRows * kPanel));
        }
        const uint64_t counters_per_query = static_cast<uint64_t>(in.num_heads) << 32;
        for (int64_t r = 0; r < rows; r += kWidth) {
          const auto row = static_cast<uint64_t>((token + r) * in.num_heads + head);
          softmax_rows<E>(m, r, std::min(kWidth, rows - r), keys, scale, in.dropout,
                          (row << 32) + static_cast<uint64_t>(key / 4), counters_per_query, key == 0, states);
        }
        for (int64_t r = 0; key > 0 && r < rows; ++r) {
          for (int64_t dim = 0; dim < d; dim += kWidth) {
            auto* sum = reinterpret_cast<float*>(m.sums + (dim / kPanel * kQueryRows + r) * kStepBytes) + dim % kPanel;
            store(sum, mul(load(sum), set1(states.correction[r])));
          }
        }
        for (int64_t p = 0; p < dim_panels; ++p) {
          product<Dot>(tiles, rows, m.probs, m.probs_stride, m.v_rows + (p * key_steps + key / kPerStep<E>)*kStepBytes,
                       whole_steps<E>(keys), std::min(kPanel, d - p * kPanel), key > 0,
                       m.sums + p * kQueryRows * kStepBytes);
        }
      }
      float inverse[kQueryRows];
      for (int64_t r = 0; r < rows; r += kWidth) store(inverse + r, div(set1(1.0f), load(states.sum + r)));
      write_rows(m.sums, kQueryRows, inverse, 1, rows, d, args.out.at(token, head), args.out.token_stride);
      if (args.softmax_stats == nullptr) continue;
      float* stats = args.softmax_stats + head * args.total_tokens + token;
      std::copy_n(states.top, rows, stats);
      std::copy_n(states.sum, rows, stats + in.num_heads * args.total_tokens);
    }
  }
}

void attention_fwd(const AttentionFwd<float>& args, const AttentionTask& task) {
  attention_fwd_heads<float>(args, task);
}

void attention_fwd(const AttentionFwd<BFloat16>& args, const AttentionTask& task) {
#if defined(FASTBERT_BF16)
  attention_fwd_heads<BFloat16>(args, task);
#else
  attention_fwd_heads<float>(args, task);
#endif
}
