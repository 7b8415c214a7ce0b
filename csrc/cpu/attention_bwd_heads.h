// Backward attention, plain and with relative terms; included by attention_bwd_body.h and
// attention_relative_bwd_body.h.
//
// Dao et al. 2022 ("FlashAttention", appendix B.4): with P the softmax of S, dP = dO V^T and delta = rowsum(P dP),
//   dS = P (dP - delta),  dQ = dS K,  dK = dS^T Q,  dV = P^T dO
// by squares of kBlock queries and kBlock keys. dk and dv are summed over the squares of one key block, dq over the key
// blocks, always in ascending order. Where a sequence has more than one square, delta = rowsum(dO O), which is the same
// but for rounding and is known before the first square.
#include "attention_pack.h"
#include "attention_relative_scores.h"

constexpr int64_t kBlock = kAttentionBlock;

// One (sequence, head)'s memory. Right-hand operands are packed, left-hand ones are rows; P^T and dS^T are read as the
// transposes of what `pairs` packs: kPerStep queries of one key in each four bytes. AMX, which reads rows only, makes
// dv^T = dO^T P and dk^T = Q^T dS instead: there `pairs` are right-hand operands.
struct BwdMemory {
  char *q_rows, *dout_rows;           // steps along the queries: operands of dk and dv
  char *q_columns, *dout_columns;     // AMX: the same as rows of dims
  int64_t columns_stride;             // bytes
  char *k_columns, *v_columns;        // one key block: operands of S and dP
  char* k_rows;                       // one key block: operand of dq
  char *q_copy, *dout_copy;           // rows that are no whole steps where they lie
  char *q_rotated, *k_rotated;        // all queries, and one key block
  float* unrotated;                   // gradients of one block, before they are turned back
  float *scores, *dprobs;             // one square
  char *probs_pairs, *dscores_pairs;  // one square: left operands of dv and dk
  char* dscores;                      // one square: left operand of dq
  char *dq_sums, *dk_sums, *dv_sums;  // those of keys for one block, or for all where heads share them
  float *row_max, *inverse_sum, *delta;
  float* multiplier;  // of two rows
};

// What of a (sequence, head) a task works on.
struct BwdRange {
  int64_t query_begin, query_end, key_begin, key_end;
  bool has_dq, has_dkv;
};

// Of the rows of the task: which keys each sees, and the key that a square begins with.
struct Window {
  const int32_t *begin, *end;
  int64_t key;
};

// The queries that see any of the keys from key_begin to key_end.
struct QueryRange {
  int64_t begin, end;
};

template <typename T>
QueryRange queries_of(const AttentionInputs<T>& in, const AttentionTask& task, int64_t key_begin, int64_t key_end) {
  const int32_t *begin = in.key_begin + task.first_token, *end = in.key_end + task.first_token;
  return {std::upper_bound(end, end + task.length, key_begin) - end,
          std::lower_bound(begin, begin + task.length, key_end) - begin};
}

// Where a side is not asked for, it is what the other one needs, in whole blocks.
template <typename T>
BwdRange range_of(const AttentionInputs<T>& in, const AttentionTask& task) {
  BwdRange range{task.query_begin,
                 task.query_end,
                 task.key_begin,
                 task.key_end,
                 task.query_begin < task.query_end,
                 task.key_begin < task.key_end};
  const auto whole = [&](int64_t n) { return std::min(task.length, (n + kBlock - 1) / kBlock * kBlock); };
  if (!range.has_dq) {
    const QueryRange seeing =
        task.has_window ? queries_of(in, task, range.key_begin, range.key_end) : QueryRange{0, task.length};
    range.query_begin = seeing.begin / kBlock * kBlock, range.query_end = whole(seeing.end);
  }
  if (!range.has_dkv) {
    const int64_t first = task.first_token + range.query_begin, last = task.first_token + range.query_end - 1;
    range.key_begin = task.has_window ? in.key_begin[first] / kBlock * kBlock : 0;
    range.key_end = task.has_window ? whole(in.key_end[last]) : task.length;
  }
  return range;
}

// Bytes of dk's or dv's sums for a block of keys.
template <typename T>
FASTBERT_SIMD int64_t key_sums_bytes(const AttentionInputs<T>& in) {
  return (in.head_dim + kPanel - 1) / kPanel * kBlock * kStepBytes;
}

template <typename E, typename T>
BwdMemory lay_out(Carver& carver, const AttentionInputs<T>& in, const BwdRange& range) {
  const int64_t rows = range.query_end - range.query_begin, dim_panels = (in.head_dim + kPanel - 1) / kPanel;
  const int64_t dim_steps = whole_steps<E>(in.head_dim), square = kBlock * kPanel;
  const int64_t rows_bytes = range.has_dkv ? dim_panels * whole_steps<E>(rows) * kStepBytes : 0;
  const int64_t copy_bytes = lies_ready<E, T>(in.head_dim) ? 0 : rows * dim_steps * 4;
  BwdMemory memory;
  memory.q_rows = carver.take(rows_bytes);
  memory.dout_rows = carver.take(rows_bytes);
  // A line more than the queries need: see FwdMemory's probs_stride.
  memory.columns_stride = whole_steps<E>(rows) * 4 + 64;
  const int64_t columns_bytes =
      range.has_dkv && kUsesAmx<typename DotOf<E>::Dot> ? dim_panels * kPanel * memory.columns_stride : 0;
  memory.q_columns = carver.take(columns_bytes);
  memory.dout_columns = carver.take(columns_bytes);
  memory.k_columns = carver.take(dim_steps * kStepBytes);
  memory.v_columns = carver.take(dim_steps * kStepBytes);
  memory.k_rows = carver.take(dim_panels * kBlock / kPerStep<E> * kStepBytes);
  memory.q_copy = carver.take(copy_bytes);
  memory.dout_copy = carver.take(copy_bytes);
  const int64_t rotated_bytes = in.rotary.cos == nullptr ? 0 : in.head_dim * static_cast<int64_t>(sizeof(T));
  memory.q_rotated = carver.take(rows * rotated_bytes);
  memory.k_rotated = carver.take(kBlock * rotated_bytes);
  memory.unrotated = carver.take_floats(in.rotary.cos == nullptr ? 0 : kBlock * in.head_dim);
  memory.scores = carver.take_floats(square);
  memory.dprobs = carver.take_floats(square);
  memory.probs_pairs = carver.take(square * static_cast<int64_t>(sizeof(E)));
  memory.dscores_pairs = carver.take(square * static_cast<int64_t>(sizeof(E)));
  // Without pairs a square is its own transpose.
  memory.dscores = kPerStep<E> == 1 ? memory.dscores_pairs : carver.take(square * static_cast<int64_t>(sizeof(E)));
  memory.dq_sums = carver.take(range.has_dq ? dim_panels * rows * kStepBytes : 0);
  const int64_t sum_blocks =
      in.group > 1 && range.has_dkv ? (range.key_end - range.key_begin + kBlock - 1) / kBlock : 1;
  memory.dk_sums = carver.take(sum_blocks * key_sums_bytes(in));
  memory.dv_sums = carver.take(sum_blocks * key_sums_bytes(in));
  memory.row_max = carver.take_floats(rows);
  memory.inverse_sum = carver.take_floats(rows);
  memory.delta = carver.take_floats(rows);
  memory.multiplier = carver.take_floats(2 * kBlock);
  return memory;
}

#include "attention_bwd_square.h"

// rowsum(dO O) of `rows` rows. fp32 sums are made in the very order of dP's: where one key has all of the probability,
// O is its v, and dP - delta must be 0 rather than a rounding error. Each space is for a panel of columns.
template <typename E, typename T>
void sum_rows(const T* dout, int64_t dout_stride, const T* out, int64_t out_stride, int64_t rows, int64_t d,
              [[maybe_unused]] char* dout_space, [[maybe_unused]] char* out_space, float* delta) {
  if constexpr (sizeof(E) == 4) {
    pack_columns<E>(dout, dout_stride, rows, d, dout_space);
    pack_columns<E>(out, out_stride, rows, d, out_space);
    for (int64_t r = 0; r < rows; r += kWidth) {
      const auto *a = reinterpret_cast<const float*>(dout_space) + r,
                 *b = reinterpret_cast<const float*>(out_space) + r;
      Floats total = set1(0.0f);
      for (int64_t i = 0; i < d; i += kAttentionChain<Float32Dot>) {
        Floats chain = set1(0.0f);
        for (int64_t j = i; j < std::min(d, i + kAttentionChain<Float32Dot>); ++j) {
          chain = fma(load(a + j * kPanel), load(b + j * kPanel), chain);
        }
        total = add(total, chain);
      }
      store(delta + r, total);
    }
  } else {
    alignas(64) float lanes[kWidth][kWidth];
    for (int64_t r = 0; r < rows; r += kWidth) {
      for (int64_t i = 0; i < std::min(kWidth, rows - r); ++i) {
        const T *a = dout + (r + i) * dout_stride, *b = out + (r + i) * out_stride;
        Floats total = set1(0.0f);
        for (int64_t j = 0; j < d; j += kWidth)
          total = fma(load_columns(a + j, d - j), load_columns(b + j, d - j), total);
        store(lanes[i], total);
      }
      store(delta + r, reduce_rows<Sum>(lanes));
    }
  }
}

// q or dout of a head as the operand of dk or dv: packed, and for AMX turned over.
template <typename E, typename T>
void pack_queries(const T* x, int64_t stride, int64_t rows, int64_t d, const BwdMemory& memory, char* packed,
                  char* columns) {
  const int64_t steps = whole_steps<E>(rows);
  pack_rows<E>(x, stride, rows, d, steps, packed);
#if defined(FASTBERT_AMX)
  if constexpr (kUsesAmx<typename DotOf<E>::Dot>) {
    for (int64_t first = 0; first < d; first += kPanel) {
      amx_transpose(packed + first / kPanel * steps * kStepBytes, steps, std::min(kPanel, d - first),
                    memory.columns_stride, columns + first * memory.columns_stride);
    }
  }
#endif
}

// dk or dv (or with AMX its transpose), (keys, dims) of one square, added to `sums` if `accumulate`: the products of
// `pairs` with what pack_queries made of q or dout, from `query` on.
template <typename E>
FASTBERT_SIMD void add_by_keys(AmxTiles& tiles, const BwdMemory& memory, const char* pairs, const char* packed,
                               const char* columns, int64_t panel, int64_t row_steps, int64_t query, int64_t rows,
                               int64_t keys, int64_t dims, bool accumulate, char* sums) {
  using Dot = typename DotOf<E>::Dot;
  if constexpr (kUsesAmx<Dot>) {
    product<Dot>(tiles, dims, columns + panel * kPanel * memory.columns_stride + query / kPerStep<E> * 4,
                 memory.columns_stride, pairs, whole_steps<E>(rows), keys, accumulate, sums);
  } else {
    vector_product<Dot>(keys, pairs, 4, kStepBytes, packed + (panel * row_steps + query / kPerStep<E>)*kStepBytes,
                        steps_of<E>(rows), dims, accumulate, sums);
  }
}

// Sums of add_by_keys on their way out. `space` is for one square.
template <typename E, typename T>
void write_by_keys(const char* sums, char* space, float factor, int64_t keys, int64_t d, T* out, int64_t stride) {
#if defined(FASTBERT_AMX)
  if constexpr (kUsesAmx<typename DotOf<E>::Dot>) {
    for (int64_t first = 0; first < d; first += kPanel, sums += kBlock * kStepBytes) {
      const int64_t dims = std::min(kPanel, d - first);
      amx_transpose(sums, dims, keys, kStepBytes, space);
      write_rows(space, kBlock, &factor, 0, keys, dims, out + first, stride);
    }
    return;
  }
#endif
  write_rows(sums, kBlock, &factor, 0, keys, d, out, stride);
}

#include "attention_relative_gradients.h"

// `terms` is read if kIsRelative; all of the sequence is in the range then.
template <typename E, bool kHasWindow, bool kIsRelative, typename T>
void attention_bwd_head(const AttentionBwd<T>& args, AmxTiles& tiles, const BwdMemory& memory, const BwdRange& range,
                        const DropoutMask& mask, const AttentionTask& task, int64_t head,
                        [[maybe_unused]] BwdTerms* terms) {
  using Dot = typename DotOf<E>::Dot;
  const AttentionInputs<T>& in = args.in;
  const int64_t d = in.head_dim, dim_panels = (d + kPanel - 1) / kPanel, dim_steps = whole_steps<E>(d);
  const int64_t block_steps = kBlock / kPerStep<E>, rows_total = range.query_end - range.query_begin;
  const int64_t row_steps = whole_steps<E>(rows_total), token = task.first_token + range.query_begin;
  const int64_t dout_stride = args.dout.token_stride, key_head = head / in.group;
  const bool is_rotated = in.rotary.cos != nullptr;
  const auto q = rotated(in, in.q, task.first_token, range.query_begin, rows_total, head, memory.q_rotated);
  const T* dout = args.dout.at(token, head);
  // The softmax of one score is 1 whatever the score: rounding must not make a gradient of dP - delta.
  const float dscores_scale = task.length == 1 ? 0.0f : in.softmax_scale;
  const bool has_bias = kIsRelative && terms->relative->bias != nullptr;
  const bool adds = kIsRelative && terms->relative->has_tables();
  const float probs_scale = has_bias ? 1.0f : in.softmax_scale;

  const float* stats = args.softmax_stats + head * args.total_tokens + token;
  for (int64_t r = 0; r < rows_total; ++r) {
    memory.row_max[r] = stats[r];
    memory.inverse_sum[r] = 1.0f / stats[r + in.num_heads * args.total_tokens];
  }
  const bool is_whole = task.length <= kBlock;
  for (int64_t r = 0; !is_whole && r < rows_total; r += kBlock) {
    sum_rows<E>(dout + r * dout_stride, dout_stride, args.out.at(token + r, head), args.out.token_stride,
                std::min(kBlock, rows_total - r), d, memory.k_columns, memory.v_columns, memory.delta + r);
  }
  const Left q_left = left_rows<E>(q.data, q.stride, rows_total, d, memory.q_copy);
  const Left dout_left = left_rows<E>(dout, dout_stride, rows_total, d, memory.dout_copy);
  if (range.has_dkv) {
    pack_queries<E>(q.data, q.stride, rows_total, d, memory, memory.q_rows, memory.q_columns);
    pack_queries<E>(dout, dout_stride, rows_total, d, memory, memory.dout_rows, memory.dout_columns);
  }

  if constexpr (kIsRelative) begin_bwd_head<E>(*terms, in, head, q_left);
  if (kHasWindow && range.has_dq) {  // of queries that see no key: it may be that no block of keys meets them
    const auto sees_nothing = [&](int64_t row) { return in.key_begin[token + row] >= in.key_end[token + row]; };
    int64_t row = (rows_total + kBlock - 1) / kBlock * kBlock - kBlock;
    for (; row >= 0 && sees_nothing(row); row -= kBlock) {
      const int64_t rows = std::min(kBlock, rows_total - row);
      for (int64_t p = 0; p < dim_panels; ++p) {
        std::memset(memory.dq_sums + (p * rows_total + row) * kStepBytes, 0, static_cast<size_t>(rows * kStepBytes));
      }
    }
  }
  // Heads that share their keys add to the same sums, one after the other.
  const bool is_first_of_keys = head % in.group == 0, is_last_of_keys = (head + 1) % in.group == 0;
  for (int64_t key = range.key_begin; key < range.key_end; key += kBlock) {
    const int64_t keys = std::min(kBlock, range.key_end - key), key_token = task.first_token + key;
    const auto k = rotated(in, in.k, task.first_token, key, keys, key_head, memory.k_rotated);
    pack_columns<E>(k.data, k.stride, keys, d, memory.k_columns);
    pack_columns<E>(in.v.at(key_token, key_head), in.v.token_stride, keys, d, memory.v_columns);
    if (range.has_dq) pack_rows<E>(k.data, k.stride, keys, d, block_steps, memory.k_rows);
    if constexpr (kIsRelative) begin_key_block<E>(*terms, memory, k, keys, d);
    const int64_t sums_of_block = in.group > 1 ? (key - range.key_begin) / kBlock * key_sums_bytes(in) : 0;
    char *dk_sums = memory.dk_sums + sums_of_block, *dv_sums = memory.dv_sums + sums_of_block;
    int64_t first_query = 0, end_query = rows_total;
    if constexpr (kHasWindow) {
      const QueryRange seeing = queries_of(in, task, key, key + keys);
      first_query = std::max<int64_t>(0, seeing.begin / kBlock * kBlock - range.query_begin);
      end_query = std::min(rows_total, seeing.end - range.query_begin);
    }
    if (kHasWindow && range.has_dkv && first_query >= end_query && is_first_of_keys) {  // which no query sees
      std::memset(dk_sums, 0, static_cast<size_t>(key_sums_bytes(in)));
      std::memset(dv_sums, 0, static_cast<size_t>(key_sums_bytes(in)));
    }
    for (int64_t query = first_query; query < end_query; query += kBlock) {
      const int64_t rows = std::min(kBlock, rows_total - query);
      if constexpr (kIsRelative) {
        if (adds) begin_square<E>(tiles, *terms, query, rows, key, keys, memory.scores);
      }
      product<Dot>(tiles, rows, q_left.data + query * q_left.stride, q_left.stride, memory.k_columns, dim_steps, keys,
                   adds, reinterpret_cast<char*>(memory.scores));
      if constexpr (kIsRelative) end_square<E>(*terms, query, rows, key, keys, in.softmax_scale, memory.scores);
      product<Dot>(tiles, rows, dout_left.data + query * dout_left.stride, dout_left.stride, memory.v_columns,
                   dim_steps, keys, false, reinterpret_cast<char*>(memory.dprobs));
      const auto row = static_cast<uint64_t>((token + query) * in.num_heads + head);
      const uint64_t counter = (row << 32) + static_cast<uint64_t>(key / 4);
      const uint64_t counters_per_query = static_cast<uint64_t>(in.num_heads) << 32;
      const Window window = kHasWindow ? Window{in.key_begin + token, in.key_end + token, key} : Window{};
      // Squares of which all is seen are as those without a window.
      const bool is_cut = kHasWindow && (window.begin[query + rows - 1] > key || window.end[query] < key + keys);
      const auto gradients = [&](auto has_window, auto whole) {
        square_gradients<E, has_window(), whole()>(memory, mask, in.dropout.p > 0.0, counter, counters_per_query, query,
                                                   rows, keys, probs_scale, window);
      };
      constexpr std::true_type kYes{};
      constexpr std::false_type kNo{};
      if (is_whole) {
        is_cut ? gradients(kYes, kYes) : gradients(kNo, kYes);
      } else {
        is_cut ? gradients(kYes, kNo) : gradients(kNo, kNo);
      }
      const bool adds_to_keys = query > first_query || !is_first_of_keys;
      const bool adds_to_queries = key > (kHasWindow ? window.begin[query] / kBlock * kBlock : 0);
      for (int64_t p = 0; p < dim_panels; ++p) {
        const int64_t dims = std::min(kPanel, d - p * kPanel);
        const int64_t sums_at = p * kBlock * kStepBytes;
        if (range.has_dkv) {
          add_by_keys<E>(tiles, memory, memory.probs_pairs, memory.dout_rows, memory.dout_columns, p, row_steps, query,
                         rows, keys, dims, adds_to_keys, dv_sums + sums_at);
          add_by_keys<E>(tiles, memory, memory.dscores_pairs, memory.q_rows, memory.q_columns, p, row_steps, query,
                         rows, keys, dims, adds_to_keys, dk_sums + sums_at);
        }
        if (range.has_dq) {
          product<Dot>(tiles, rows, memory.dscores, kPanel * static_cast<int64_t>(sizeof(E)),
                       memory.k_rows + p * block_steps * kStepBytes, whole_steps<E>(keys), dims, adds_to_queries,
                       memory.dq_sums + (p * rows_total + query) * kStepBytes);
        }
      }
      if constexpr (kIsRelative) {
        // The only score of a query has no gradient, whatever is left of it.
        if (task.length > 1) add_square<E>(tiles, *terms, memory, query, rows, rows_total, key, keys, d, dk_sums);
      }
    }
    if constexpr (kIsRelative) end_key_block<E>(*terms, keys, d, dk_sums);
    if (!range.has_dkv || !is_last_of_keys) continue;
    auto* space = reinterpret_cast<char*>(memory.scores);
    T* dk = args.dk.at(key_token, key_head);
    if (is_rotated) {
      write_by_keys<E>(dk_sums, space, dscores_scale, keys, d, memory.unrotated, d);
      rotate_rows(in.rotary, task.first_token, key, -1.0f, memory.unrotated, d, keys, d, dk, args.dk.token_stride);
    } else {
      write_by_keys<E>(dk_sums, space, dscores_scale, keys, d, dk, args.dk.token_stride);
    }
    write_by_keys<E>(dv_sums, space, 1.0f, keys, d, args.dv.at(key_token, key_head), args.dv.token_stride);
  }
  if (!range.has_dq) return;
  T* dq = args.dq.at(token, head);
  if (!is_rotated) {
    write_rows(memory.dq_sums, rows_total, &dscores_scale, 0, rows_total, d, dq, args.dq.token_stride);
    return;
  }
  for (int64_t r = 0; r < rows_total; r += kBlock) {
    const int64_t rows = std::min(kBlock, rows_total - r);
    write_rows(memory.dq_sums + r * kStepBytes, rows_total, &dscores_scale, 0, rows, d, memory.unrotated, d);
    rotate_rows(in.rotary, task.first_token, range.query_begin + r, -1.0f, memory.unrotated, d, rows, d,
                dq + r * args.dq.token_stride, args.dq.token_stride);
  }
}
