// Forward attention of short sequences; included by attention_fwd_heads.h, for one ISA.

// A sequence of at most one panel: the scores are made the other way round, a row for each key and a lane for each
// query. Then what softmax needs of a query's keys is maxima and sums of whole vectors, none of whose lanes is beyond
// the last key, and one vector of each lies ready for all the queries. With the scores of 12 tokens by rows, reducing,
// broadcasting and masking took as long as all the products. The results are the same to the bit: the sums are made in
// the order of reduce_rows.
//
// Not for AMX, which does not read a left operand the other way round.
struct FwdShortMemory {
  char* q_columns;              // packed, all queries
  char* k_copy;                 // where rows are no whole steps
  char* v_rows;                 // packed, all keys
  float* scores;                // (keys, kPanel)
  char* probs;                  // (steps of keys, kPanel)
  char *q_rotated, *k_rotated;  // rows
  char* sums;                   // rows of the output
  char* q_copy;                 // of relative terms, where rows are no whole steps
  float* space;
};

template <typename E, bool kIsRelative, typename T>
FwdShortMemory lay_out_fwd_short(Carver& carver, const AttentionInputs<T>& in, int64_t n) {
  const int64_t dim_panels = (in.head_dim + kPanel - 1) / kPanel, dim_steps = whole_steps<E>(in.head_dim);
  const int64_t rotated_bytes = in.rotary.cos == nullptr ? 0 : in.head_dim * static_cast<int64_t>(sizeof(T));
  FwdShortMemory memory;
  memory.q_columns = carver.take(dim_steps * kStepBytes);
  memory.k_copy = carver.take(lies_ready<E, T>(in.head_dim) ? 0 : n * dim_steps * 4);
  memory.v_rows = carver.take(dim_panels * steps_of<E>(n) * kStepBytes);
  memory.scores = carver.take_floats(n * kPanel);
  memory.probs = carver.take(steps_of<E>(n) * kStepBytes);
  memory.q_rotated = carver.take(n * rotated_bytes);
  memory.k_rotated = carver.take(n * rotated_bytes);
  memory.sums = carver.take(dim_panels * n * kStepBytes);
  if constexpr (kIsRelative) {
    memory.q_copy = carver.take(lies_ready<E, T>(in.head_dim) ? 0 : n * dim_steps * 4);
    memory.space = carver.take_floats(kTermSpace);
  }
  return memory;
}

// Scores (keys, kPanel) of kWidth queries to probabilities that lack their division by the sum, as steps of keys.
// `counter` is that of the first query's first keys.
template <typename E, bool kHasDropout>
FASTBERT_SIMD void softmax_columns(const float* scores, int64_t keys, float scale, const DropoutMask& mask,
                                   uint64_t counter, uint64_t counters_per_query, char* probs, float* row_max,
                                   float* row_sum) {
  const Floats sign = set1(scale < 0.0f ? -1.0f : 1.0f), scales = set1(scale);
  Floats query_max = set1(-__builtin_inff());
  for (int64_t key = 0; key < keys; ++key) query_max = max(query_max, mul(load(scores + key * kPanel), sign));
  query_max = mul(query_max, sign);
  store(row_max, query_max);
  [[maybe_unused]] const Longs every_other_query = multiples(2 * counters_per_query);
  Floats partial_sum[kWidth];
  for (int64_t i = 0; i < kWidth; ++i) partial_sum[i] = set1(0.0f);
  for (int64_t first = 0; first < keys; first += 4) {
    [[maybe_unused]] ColumnMultipliers multipliers;
    if constexpr (kHasDropout) {
      multipliers =
          draw_columns(mask, counter + static_cast<uint64_t>(first / 4), counters_per_query, every_other_query);
    }
    Floats x[4];
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; ++i) {
      x[i] = set1(0.0f);
      if (first + i >= keys) continue;
      x[i] = exp_score<E>(scores + (first + i) * kPanel, query_max, scales, kWidth);
      Floats& sum = partial_sum[(first + i) % kWidth];
      sum = add(sum, x[i]);
      if constexpr (kHasDropout) x[i] = mul(x[i], multipliers.column[i]);
    }
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; i += kPerStep<E>) {
      if (first + i >= keys) break;
      store_step<E>(probs + (first + i) / kPerStep<E> * kStepBytes, x[i], x[i + kPerStep<E> - 1]);
    }
  }
#pragma GCC unroll 4
  for (int64_t half = kWidth / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < half; ++i) partial_sum[i] = add(partial_sum[i], partial_sum[i + half]);
  }
  store(row_sum, partial_sum[0]);
}

template <typename E, bool kIsRelative, typename T>
void attention_fwd_short(const AttentionFwd<T>& args, const AttentionTask& task,
                         [[maybe_unused]] const RelativeTerms* relative) {
  using Dot = typename DotOf<E>::Dot;
  static thread_local Scratch scratch;
  const AttentionInputs<T>& in = args.in;
  const int64_t n = task.length, d = in.head_dim, token = task.first_token, dim_panels = (d + kPanel - 1) / kPanel;
  Carver counting{nullptr};
  lay_out_fwd_short<E, kIsRelative>(counting, in, n);
  Carver carver{scratch.get(counting.size)};
  const FwdShortMemory m = lay_out_fwd_short<E, kIsRelative>(carver, in, n);
  const bool has_bias = kIsRelative && relative->bias != nullptr, adds = kIsRelative && relative->has_tables();
  const float scale = has_bias ? kLog2e : in.softmax_scale * kLog2e;
  const DropoutMask mask = DropoutMask::of(in.dropout);
  const uint64_t counters_per_query = static_cast<uint64_t>(in.num_heads) << 32;

  for (int64_t head = task.head_begin; head < task.head_end; ++head) {
    const int64_t key_head = in.group == 1 ? head : head / in.group;
    if (in.group == 1 || head == task.head_begin || head % in.group == 0) {
      pack_rows<E>(in.v.at(token, key_head), in.v.token_stride, n, d, steps_of<E>(n), m.v_rows);
    }
    if (head + 1 < task.head_end) {
      fetch_rows(in.q, token, n, head + 1, d);
      fetch_rows(args.out, token, n, head + 1, d);
      if (in.group == 1 || (head + 1) % in.group == 0) {
        fetch_rows(in.k, token, n, key_head + 1, d);
        fetch_rows(in.v, token, n, key_head + 1, d);
      }
    }
    const auto q = rotated(in, in.q, token, 0, n, head, m.q_rotated);
    const auto k_rows = rotated(in, in.k, token, 0, n, key_head, m.k_rotated);
    const Left k = left_rows<E>(k_rows.data, k_rows.stride, n, d, m.k_copy);
    pack_columns<E>(q.data, q.stride, n, d, m.q_columns);
    [[maybe_unused]] const TileScores tile{m.scores, 0, 0};
    if constexpr (kIsRelative) {
      if (adds) {
        const Left q_left = left_rows<E>(q.data, q.stride, n, d, m.q_copy);
        short_terms<E>(*relative, head, n, d, q_left, k, m.space, tile);
      }
    }
    vector_product<Dot>(n, k.data, k.stride, 4, m.q_columns, whole_steps<E>(d), n, adds,
                        reinterpret_cast<char*>(m.scores));
    if constexpr (kIsRelative) {
      if (has_bias) add_bias(n, n, bias_turned_of_head(*relative, head), in.softmax_scale, tile);
    }
    alignas(64) float row_max[kPanel], row_sum[kPanel], inverse[kPanel];
    for (int64_t query = 0; query < n; query += kWidth) {
      const uint64_t counter = static_cast<uint64_t>((token + query) * in.num_heads + head) << 32;
      if (in.dropout.p > 0.0) {
        softmax_columns<E, true>(m.scores + query, n, scale, mask, counter, counters_per_query, m.probs + query * 4,
                                 row_max + query, row_sum + query);
      } else {
        softmax_columns<E, false>(m.scores + query, n, scale, mask, counter, counters_per_query, m.probs + query * 4,
                                  row_max + query, row_sum + query);
      }
      store(inverse + query, div(set1(1.0f), load(row_sum + query)));
    }
    for (int64_t p = 0; p < dim_panels; ++p) {
      vector_product<Dot>(n, m.probs, 4, kStepBytes, m.v_rows + p * steps_of<E>(n) * kStepBytes, steps_of<E>(n),
                          std::min(kPanel, d - p * kPanel), false, m.sums + p * n * kStepBytes);
    }
    write_rows(m.sums, n, inverse, 1, n, d, args.out.at(token, head), args.out.token_stride);
    if (args.softmax_stats == nullptr) continue;
    float* stats = args.softmax_stats + head * args.total_tokens + token;
    std::copy_n(row_max, n, stats);
    std::copy_n(row_sum, n, stats + in.num_heads * args.total_tokens);
  }
}
