// Forward attention, plain and with relative terms; included by attention_fwd_body.h and attention_relative_fwd_body.h.
#include "attention_pack.h"
#include "attention_relative_scores.h"

// Keys are taken in blocks whose scores and packed operands stay in the second-level cache; a longer row rescales what
// it has summed when a later block holds a larger score (Milakov & Gimelshein 2018, "Online normalizer calculation for
// softmax", algorithm 3). AMX, whose products take less time than the way of the scores through the caches, has blocks
// that nearly stay in the first.
#if defined(FASTBERT_AMX)
constexpr int64_t kQueryRows = 32, kKeyBlock = 256;
#else
constexpr int64_t kQueryRows = 48, kKeyBlock = 1024;
#endif

// With relative terms more queries share what belongs to the keys, and fewer keys keep their scores in the cache.
constexpr int64_t kRelativeRows = kMostRows, kRelativeKeyBlock = kTermBlock;

// With a window, fewer queries at once share fewer keys that some of them do not see. Tasks begin at multiples of the
// rows, and a block's keys at multiples of what a tile's columns and a group of steps have.
#if defined(FASTBERT_AMX)
constexpr int64_t kWindowRows = 32, kKeyAlignment = 32;
#else
constexpr int64_t kWindowRows = 16, kKeyAlignment = 16;
#endif
static_assert(kAttentionBlock % kWindowRows == 0 && kPanel % kKeyAlignment == 0);

struct FwdMemory {
  char *k_columns, *v_rows;     // packed, all keys of the task
  float* scores;                // a block of queries by one of keys
  char *probs, *q_copy;         // the same; q_copy where rows are no whole steps
  char *q_rotated, *k_rotated;  // rows of one block of queries, and of one panel of keys
  char* sums;                   // rows of the output
  float* multiplier;            // null without dropout
  int64_t probs_stride;         // bytes
};

// The keys that a block of queries takes, counted in the sequence.
struct KeyRange {
  int64_t begin, end;
};

template <bool kHasWindow, typename T>
FASTBERT_SIMD KeyRange keys_of(const AttentionInputs<T>& in, const AttentionTask& task, int64_t query, int64_t rows) {
  if constexpr (!kHasWindow) return {0, task.length};
  const int64_t token = task.first_token + query;
  return {in.key_begin[token] / kKeyAlignment * kKeyAlignment, in.key_end[token + rows - 1]};
}

// What the rows of a block see of a block of keys, which are columns from `shift` on of the scores' panels.
struct Window {
  const int32_t *begin, *end;  // of each row
  int64_t key, shift;
};

// What is known of the rows of a block after some of their keys: the largest score (the smallest, if softmax_scale is
// negative), the sum of exp(softmax_scale * (score - row_max)), and what earlier sums were multiplied by when row_max
// changed.
template <int64_t kRows>
struct RowStates {
  alignas(64) float row_max[kRows], row_sum[kRows], correction[kRows];
};

// Probabilities of one row, and what is to be summed of them: all before dropout.
template <typename E, bool kHasDropout, int64_t kRows>
FASTBERT_SIMD Floats exp_row(const float* scores, int64_t keys, Floats row_max, Floats scale, const float* multiplier,
                             E* probs) {
  Floats lane_sum = set1(0.0f);
  for (int64_t key = 0; key < keys; key += kPanel, scores += kRows * kPanel) {
    const int64_t columns = std::min(kPanel, keys - key);
    for (int64_t i = 0; i < columns; i += kWidth) {
      Floats x = exp_score<E>(scores + i, row_max, scale, columns - i);
      lane_sum = add(lane_sum, x);
      if constexpr (kHasDropout) x = mul(x, load(multiplier + key + i));
      store(probs + key + i, x);
    }
  }
  // Zeros up to whole steps: at most one vector more, where a group of steps has two.
  if constexpr (kStepGroup<E> * kPerStep<E> > kWidth) {
    const int64_t end = (keys + kWidth - 1) / kWidth * kWidth;
    if (end % (kStepGroup<E> * kPerStep<E>) != 0) store(probs + end, set1(0.0f));
  }
  return lane_sum;
}

// The scores of column `column` and those after it in its panel.
template <int64_t kRows>
FASTBERT_SIMD const float* score_at(const float* row, int64_t column) {
  return row + column / kPanel * kRows * kPanel + column % kPanel;
}

// exp_row of the keys from `begin` to `end`, and zeros for the others.
template <typename E, bool kHasDropout, int64_t kRows>
FASTBERT_SIMD Floats exp_row_seen(const float* row, int64_t shift, int64_t begin, int64_t end, int64_t keys,
                                  Floats row_max, Floats scale, const float* multiplier, E* probs) {
  Floats lane_sum = set1(0.0f);
  int64_t key = 0;
  for (; key + kWidth <= begin; key += kWidth) store(probs + key, lane_sum);
  for (; key < end; key += kWidth) {
    Floats x = exp_seen<E>(score_at<kRows>(row, shift + key), row_max, scale, begin - key, end - key);
    lane_sum = add(lane_sum, x);
    if constexpr (kHasDropout) x = mul(x, load(multiplier + key));
    store(probs + key, x);
  }
  for (; key < whole_steps<E>(keys) * kPerStep<E>; key += kWidth) store(probs + key, set1(0.0f));
  return lane_sum;
}

// Scores (panels, kRows, kPanel) of up to kWidth rows from `first` on to probabilities that lack their division by
// the sum; `scale` is softmax_scale * log2(e). Row r's dropout counters begin at counter + r * counters_per_query.
// Where `row_maxima` are known, each of the block's has the row's largest score in one of its lanes.
template <typename E, bool kHasWindow, int64_t kRows>
void softmax_rows(const FwdMemory& m, int64_t first, int64_t rows, int64_t keys, const Window& window, float scale,
                  const DropoutMask& mask, uint64_t counter, uint64_t counters_per_query, bool is_first,
                  const float (*row_maxima)[kWidth], RowStates<kRows>& states) {
  constexpr int64_t kVectors = kPanel / kWidth, kPanelStride = kRows * kPanel;
  alignas(64) float lanes[kWidth][kWidth];
  const int64_t whole = keys / kPanel;
  const Floats sign = set1(scale < 0.0f ? -1.0f : 1.0f), scales = set1(scale);
  const float* scores = m.scores + first * kPanel;
  [[maybe_unused]] const auto seen = [&](int64_t r) -> KeyRange {
    return {std::clamp<int64_t>(window.begin[first + r] - window.key, 0, keys),
            std::clamp<int64_t>(window.end[first + r] - window.key, 0, keys)};
  };
  for (int64_t r = 0; row_maxima == nullptr && r < rows; ++r) {
    const float* row = scores + r * kPanel;
    if constexpr (kHasWindow) {
      // Not -inf, whose difference from itself is no number: a later block may hold the first key that the row sees.
      Floats lane_max = set1(-__FLT_MAX__ / 4);
      const KeyRange range = seen(r);
      for (int64_t key = range.begin / kWidth * kWidth; key < range.end; key += kWidth) {
        const Floats x = mul(load(score_at<kRows>(row, window.shift + key)), sign);
        lane_max = max(lane_max, min(within(range.begin - key, range.end - key), x));
      }
      store(lanes[r], lane_max);
      continue;
    }
    Floats lane_max[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) lane_max[v] = set1(-__builtin_inff());
    for (int64_t p = 0; p < whole; ++p) {
      for (int64_t v = 0; v < kVectors; ++v) {
        lane_max[v] = max(lane_max[v], mul(load(row + p * kPanelStride + v * kWidth), sign));
      }
    }
    for (int64_t i = 0; i < keys % kPanel; i += kWidth) {
      lane_max[0] = max(lane_max[0], fma(load(row + whole * kPanelStride + i), sign, beyond(keys % kPanel - i)));
    }
    for (int64_t v = 1; v < kVectors; ++v) lane_max[0] = max(lane_max[0], lane_max[v]);
    store(lanes[r], lane_max[0]);
  }
  Floats row_max = reduce_rows<Max>(row_maxima == nullptr ? lanes : row_maxima + first), correction = set1(0.0f),
         sums = set1(0.0f);
  if (!is_first) {
    const Floats before = load(states.row_max + first);
    row_max = max(mul(before, sign), row_max);
    correction = exp2<true>(mul(sub(before, mul(row_max, sign)), scales));
    sums = load(states.row_sum + first);
  }
  store(states.row_max + first, mul(row_max, sign));
  store(states.correction + first, correction);

  for (int64_t r = 0; r < rows; ++r) {
    const float* row = scores + r * kPanel;
    E* probs = reinterpret_cast<E*>(m.probs + (first + r) * m.probs_stride);
    const Floats max_of_row = set1(states.row_max[first + r]);
    Floats lane_sum;
    if constexpr (kHasWindow) {
      const auto [begin, end] = seen(r);
      if (m.multiplier == nullptr) {
        lane_sum =
            exp_row_seen<E, false, kRows>(row, window.shift, begin, end, keys, max_of_row, scales, nullptr, probs);
      } else {
        const int64_t drawn = begin / (2 * kWidth) * (2 * kWidth);
        draw_row(mask, counter + static_cast<uint64_t>(r) * counters_per_query + static_cast<uint64_t>(drawn / 4),
                 end - drawn, m.multiplier + drawn);
        lane_sum =
            exp_row_seen<E, true, kRows>(row, window.shift, begin, end, keys, max_of_row, scales, m.multiplier, probs);
      }
    } else if (m.multiplier == nullptr) {
      lane_sum = exp_row<E, false, kRows>(row, keys, max_of_row, scales, nullptr, probs);
    } else {
      const float* multiplier = draw_in_turn(mask, counter + static_cast<uint64_t>(r) * counters_per_query,
                                             counters_per_query, r, keys, kWidth, m.multiplier);
      lane_sum = exp_row<E, true, kRows>(row, keys, max_of_row, scales, multiplier, probs);
    }
    store(lanes[r], lane_sum);
  }
  store(states.row_sum + first, fma(sums, correction, reduce_rows<Sum>(lanes)));
}

// For n keys, in blocks of `block`, beside which a window's scores may begin within a panel.
template <typename E, bool kHasWindow, int64_t kRows, typename T>
FwdMemory lay_out(Carver& carver, const AttentionInputs<T>& in, int64_t n, int64_t block) {
  const int64_t dim_panels = (in.head_dim + kPanel - 1) / kPanel, dim_steps = whole_steps<E>(in.head_dim);
  FwdMemory memory;
  memory.k_columns = carver.take((n + kPanel - 1) / kPanel * dim_steps * kStepBytes);
  memory.v_rows = carver.take(dim_panels * whole_steps<E>(n) * kStepBytes);
  memory.scores = carver.take_floats((block + (kHasWindow ? kPanel : 0)) * kRows);
  // A line more than the keys need: rows 1 KB apart would compete for the same sets of the first-level cache.
  memory.probs_stride = block * static_cast<int64_t>(sizeof(E)) + 64;
  memory.probs = carver.take(kRows * memory.probs_stride);
  memory.q_copy = carver.take(lies_ready<E, T>(in.head_dim) ? 0 : kRows * dim_steps * 4);
  const int64_t rotated_bytes = in.rotary.cos == nullptr ? 0 : in.head_dim * static_cast<int64_t>(sizeof(T));
  memory.q_rotated = carver.take(kRows * rotated_bytes);
  memory.k_rotated = carver.take(kPanel * rotated_bytes);
  memory.sums = carver.take(dim_panels * kRows * kStepBytes);
  memory.multiplier = in.dropout.p > 0.0 ? carver.take_floats(block + kWidth) : nullptr;
  return memory;
}

// The states and sums of rows none of which sees a key.
template <int64_t kRows>
void see_nothing(const FwdMemory& m, int64_t dim_panels, int64_t rows, RowStates<kRows>& states) {
  std::fill_n(states.row_sum, kRows, 0.0f);
  for (int64_t p = 0; p < dim_panels; ++p) {
    std::memset(m.sums + p * kRows * kStepBytes, 0, static_cast<size_t>(rows * kStepBytes));
  }
}

// The keys' panels of a head, n keys from `position` on.
template <typename E, typename T>
void pack_keys(const AttentionInputs<T>& in, int64_t first_token, int64_t position, int64_t n, int64_t head,
               const FwdMemory& m) {
  const int64_t at_once = in.rotary.cos == nullptr ? n : kPanel, panel_bytes = whole_steps<E>(in.head_dim) * kStepBytes;
  for (int64_t key = 0; key < n; key += at_once) {
    const int64_t keys = std::min(at_once, n - key);
    const auto k = rotated(in, in.k, first_token, position + key, keys, head, m.k_rotated);
    pack_columns<E>(k.data, k.stride, keys, in.head_dim, m.k_columns + key / kPanel * panel_bytes);
  }
}

// `relative` is read if kIsRelative.
template <typename E, bool kHasWindow, bool kIsRelative, typename T>
void attention_fwd_heads(const AttentionFwd<T>& args, const AttentionTask& task,
                         [[maybe_unused]] const RelativeTerms* relative) {
  using Dot = typename DotOf<E>::Dot;
  static thread_local Scratch scratch;
  constexpr int64_t kRows = kIsRelative ? kRelativeRows : kQueryRows, step = kHasWindow ? kWindowRows : kRows;
  const AttentionInputs<T>& in = args.in;
  // Keys are packed from a panel's begin on; the largest range of a block of queries tells the size of the blocks.
  const KeyRange all = keys_of<kHasWindow>(in, task, task.query_begin, task.query_end - task.query_begin);
  const int64_t first_key = all.begin / kPanel * kPanel, n = all.end - first_key;
  int64_t widest = kHasWindow ? 0 : n;
  for (int64_t query = task.query_begin; kHasWindow && query < task.query_end; query += step) {
    const KeyRange range = keys_of<kHasWindow>(in, task, query, std::min(step, task.query_end - query));
    widest = std::max(widest, range.end - range.begin);
  }
  const int64_t d = in.head_dim, dim_panels = (d + kPanel - 1) / kPanel;
  const int64_t dim_steps = whole_steps<E>(d), key_steps = whole_steps<E>(n);
  const int64_t block = std::min((widest + kPanel - 1) / kPanel * kPanel, kIsRelative ? kRelativeKeyBlock : kKeyBlock);
  Carver counting{nullptr};
  lay_out<E, kHasWindow, kRows>(counting, in, n, block);
  if constexpr (kIsRelative) lay_out_terms<E>(counting, *relative, in, task, first_key, n);
  Carver carver{scratch.get(counting.size)};
  const FwdMemory m = lay_out<E, kHasWindow, kRows>(carver, in, n, block);
  [[maybe_unused]] QueryTerms terms{};
  if constexpr (kIsRelative) terms = lay_out_terms<E>(carver, *relative, in, task, first_key, n);
  const bool has_bias = kIsRelative && relative->bias != nullptr, adds = kIsRelative && relative->has_tables();
  const float scale = has_bias ? kLog2e : in.softmax_scale * kLog2e;
  const DropoutMask mask = DropoutMask::of(in.dropout);
  AmxTiles tiles;

  for (int64_t head = task.head_begin; head < task.head_end; ++head) {
    // A division only where heads share keys: it would show beside a short sequence.
    if (in.group == 1 || head == task.head_begin || head % in.group == 0) {
      const int64_t key_head = in.group == 1 ? head : head / in.group;
      pack_keys<E>(in, task.first_token, first_key, n, key_head, m);
      pack_rows<E>(in.v.at(task.first_token + first_key, key_head), in.v.token_stride, n, d, key_steps, m.v_rows);
    }
    if constexpr (kIsRelative) begin_head<E>(terms, in, task.first_token, head);
    for (int64_t query = task.query_begin; query < task.query_end; query += step) {
      const int64_t rows = std::min(step, task.query_end - query), token = task.first_token + query;
      const auto q_rows = rotated(in, in.q, task.first_token, query, rows, head, m.q_rotated);
      const Left q = left_rows<E>(q_rows.data, q_rows.stride, rows, d, m.q_copy);
      const KeyRange range = keys_of<kHasWindow>(in, task, query, rows);
      RowStates<kRows> states;
      if (kHasWindow && range.begin >= range.end) see_nothing(m, dim_panels, rows, states);
      for (int64_t key = range.begin; key < range.end; key += block) {
        const int64_t keys = std::min(block, range.end - key), packed = key - first_key;
        const int64_t shift = kHasWindow ? packed % kPanel : 0, columns = shift + keys;
        [[maybe_unused]] const TileScores tile{m.scores, kRows * kPanel, shift};
        if constexpr (kIsRelative) {
          if (adds) begin_scores<E>(tiles, terms, query, rows, q, key, keys, tile);
        }
        for (int64_t p = 0; p * kPanel < columns; ++p) {
          const int64_t skipped = p == 0 ? shift : 0;
          product<Dot>(tiles, rows, q.data, q.stride,
                       m.k_columns + (packed / kPanel + p) * dim_steps * kStepBytes + skipped * 4, dim_steps,
                       std::min(kPanel, columns - p * kPanel) - skipped, adds,
                       reinterpret_cast<char*>(m.scores + p * kRows * kPanel + skipped));
        }
        [[maybe_unused]] alignas(64) float row_maxima[kIsRelative ? kRows : 1][kWidth];
        bool has_maxima = false;
        if constexpr (kIsRelative) {
          has_maxima =
              end_scores(terms, query, rows, key, keys, in.softmax_scale, tile, kHasWindow ? nullptr : row_maxima);
        }
        const Window window = kHasWindow ? Window{in.key_begin + token, in.key_end + token, key, shift} : Window{};
        const uint64_t counters_per_query = static_cast<uint64_t>(in.num_heads) << 32;
        for (int64_t r = 0; r < rows; r += kWidth) {
          const auto row = static_cast<uint64_t>((token + r) * in.num_heads + head);
          softmax_rows<E, kHasWindow, kRows>(m, r, std::min(kWidth, rows - r), keys, window, scale, mask,
                                             (row << 32) + static_cast<uint64_t>(key / 4), counters_per_query,
                                             key == range.begin, has_maxima ? row_maxima : nullptr, states);
        }
        for (int64_t r = 0; key > range.begin && r < rows; ++r) {
          for (int64_t dim = 0; dim < d; dim += kWidth) {
            auto* sum = reinterpret_cast<float*>(m.sums + (dim / kPanel * kRows + r) * kStepBytes) + dim % kPanel;
            store(sum, mul(load(sum), set1(states.correction[r])));
          }
        }
        for (int64_t p = 0; p < dim_panels; ++p) {
          product<Dot>(tiles, rows, m.probs, m.probs_stride,
                       m.v_rows + (p * key_steps + packed / kPerStep<E>)*kStepBytes, whole_steps<E>(keys),
                       std::min(kPanel, d - p * kPanel), key > range.begin, m.sums + p * kRows * kStepBytes);
        }
      }
      if constexpr (kHasWindow) {
        for (int64_t r = 0; r < rows; ++r) {
          if (states.row_sum[r] == 0.0f) states.row_max[r] = 0.0f, states.row_sum[r] = 1.0f;
        }
      }
      float inverse[kRows];
      for (int64_t r = 0; r < rows; r += kWidth) store(inverse + r, div(set1(1.0f), load(states.row_sum + r)));
      write_rows(m.sums, kRows, inverse, 1, rows, d, args.out.at(token, head), args.out.token_stride);
      if (args.softmax_stats == nullptr) continue;
      float* stats = args.softmax_stats + head * args.total_tokens + token;
      std::copy_n(states.row_max, rows, stats);
      std::copy_n(states.row_sum, rows, stats + in.num_heads * args.total_tokens);
    }
  }
}

#include "attention_fwd_short.h"
