// Forward attention for one ISA; included by attention_fwd.cpp through foreach_isa.h.
#include "attention_pack.h"

// Keys are taken in blocks whose scores and packed operands stay in the second-level cache; a longer row rescales what
// it has summed when a later block holds a larger score (Milakov & Gimelshein 2018, "Online normalizer calculation for
// softmax", algorithm 3).
constexpr int64_t kQueryRows = 24;
constexpr int64_t kKeyBlock = 512;

// What is known of a row after some of its keys: the top score (the smallest, if softmax_scale is negative) and the sum
// of exp(softmax_scale * (score - top)).
struct RowState {
  float top, sum;
};

// Scores of one row, in panels `panel_stride` floats apart, to probabilities that lack their division by the sum.
// Returns what the sums of earlier blocks must be multiplied by. `scale` is softmax_scale * log2(e).
template <typename E>
FASTBERT_SIMD float softmax_row(const float* scores, int64_t panel_stride, int64_t keys, float scale,
                                const float* multiplier, bool is_first, RowState& state, E* probs) {
  constexpr int64_t kVectors = kPanel / kWidth;
  const int64_t whole = keys / kPanel;
  const float sign = scale < 0.0f ? -1.0f : 1.0f;
  Floats tops[kVectors];
  for (int64_t v = 0; v < kVectors; ++v) tops[v] = set1(is_first ? -__builtin_inff() : state.top * sign);
  for (int64_t p = 0; p < whole; ++p) {
    const float* from = scores + p * panel_stride;
    for (int64_t v = 0; v < kVectors; ++v) tops[v] = max(tops[v], mul(load(from + v * kWidth), set1(sign)));
  }
  const float* tail = scores + whole * panel_stride;
  for (int64_t i = 0; i < keys % kPanel; i += kWidth) {
    tops[0] = max(tops[0], fma(load(tail + i), set1(sign), beyond(keys % kPanel - i)));
  }
  for (int64_t v = 1; v < kVectors; ++v) tops[0] = max(tops[0], tops[v]);
  const float top = largest(tops[0]) * sign;

  Floats total = set1(0.0f);
  for (int64_t key = 0; key < keys; key += kPanel) {
    const float* from = scores + key / kPanel * panel_stride;
    for (int64_t i = 0; i < std::min(kPanel, keys - key); i += kWidth) {
      Floats x = exp_score<E>(from + i, set1(top), set1(scale), keys - key - i);
      total = add(total, x);
      if (multiplier != nullptr) x = mul(x, load(multiplier + key + i));
      store(probs + key + i, x);
    }
  }
  float correction = 1.0f;
  if (!is_first) {
    float lanes[kWidth];
    store(lanes, exp2<true>(set1((state.top - top) * scale)));
    correction = lanes[0];
  }
  state.sum = (is_first ? 0.0f : state.sum * correction) + sum(total);
  state.top = top;
  return correction;
}

struct FwdMemory {
  char *k_columns, *v_rows;        // packed, all keys
  char *scores, *probs, *q_copy;   // kQueryRows rows by one block of keys; q_copy where rows are no whole steps
  char* sums;                      // kQueryRows rows of the output
  float* multiplier;               // null without dropout
  int64_t probs_stride;            // bytes
};

template <typename E, typename T>
FwdMemory lay_out(Carver& carver, const AttentionInputs<T>& in, int64_t n, int64_t block) {
  const int64_t dim_panels = (in.head_dim + kPanel - 1) / kPanel, dim_steps = steps_of<E>(in.head_dim);
  FwdMemory memory;
  memory.k_columns = carver.take((n + kPanel - 1) / kPanel * dim_steps * kStepBytes);
  memory.v_rows = carver.take(dim_panels * steps_of<E>(n) * kStepBytes);
  memory.scores = carver.take(block / kPanel * kQueryRows * kStepBytes);
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
  const int64_t dim_steps = steps_of<E>(d), key_steps = steps_of<E>(n);
  const int64_t block = std::min((n + kPanel - 1) / kPanel * kPanel, kKeyBlock);
  Carver counting{nullptr};
  lay_out<E>(counting, in, n, block);
  Carver carver{scratch.get(counting.size)};
  const FwdMemory m = lay_out<E>(carver, in, n, block);
  const float scale = in.softmax_scale * kLog2e;

  for (int64_t head = task.head_begin; head < task.head_end; ++head) {
    pack_columns<E>(in.k.at(task.first_token, head), in.k.token_stride, n, d, m.k_columns);
    pack_rows<E>(in.v.at(task.first_token, head), in.v.token_stride, n, d, key_steps, m.v_rows);
    for (int64_t query = task.query_begin; query < task.query_end; query += kQueryRows) {
      const int64_t rows = std::min(kQueryRows, task.query_end - query), token = task.first_token + query;
      const Left q = left_rows<E>(in.q.at(token, head), in.q.token_stride, rows, d, m.q_copy);
      RowState state[kQueryRows];
      for (int64_t key = 0; key < n; key += block) {
        const int64_t keys = std::min(block, n - key);
        for (int64_t p = 0; p * kPanel < keys; ++p) {
          product<Dot>(rows, q.data, q.stride, 4, m.k_columns + (key / kPanel + p) * dim_steps * kStepBytes, dim_steps,
                       std::min(kPanel, keys - p * kPanel), false, m.scores + p * kQueryRows * kStepBytes);
        }
        for (int64_t r = 0; r < rows; ++r) {
          if (m.multiplier != nullptr) {
            const auto row = static_cast<uint64_t>((token + r) * in.num_heads + head);
            fill_dropout_from(in.dropout, (row << 32) + static_cast<uint64_t>(key / 4), keys, m.multiplier);
          }
          const float correction = softmax_row<E>(reinterpret_cast<const float*>(m.scores + r * kStepBytes), kQueryRows * kPanel,
                                                  keys, scale, m.multiplier, key == 0, state[r],
                                                  reinterpret_cast<E*>(m.probs + r * m.probs_stride));
          if (key == 0) continue;
          for (int64_t dim = 0; dim < d; dim += kWidth) {
            auto* sum = reinterpret_cast<float*>(m.sums + (dim / kPanel * kQueryRows + r) * kStepBytes) + dim % kPanel;
            store(sum, mul(load(sum), set1(correction)));
          }
        }
        for (int64_t p = 0; p < dim_panels; ++p) {
          product<Dot>(rows, m.probs, m.probs_stride, 4, m.v_rows + (p * key_steps + key / kPerStep<E>) * kStepBytes,
                       steps_of<E>(keys), std::min(kPanel, d - p * kPanel), key > 0, m.sums + p * kQueryRows * kStepBytes);
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        write_row(m.sums + r * kStepBytes, kQueryRows, 1.0f / state[r].sum, d, args.out.at(token + r, head));
        if (args.softmax_stats != nullptr) {
          float* stats = args.softmax_stats + head * args.total_tokens + token + r;
          stats[0] = state[r].top;
          stats[in.num_heads * args.total_tokens] = state[r].sum;
        }
      }
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
