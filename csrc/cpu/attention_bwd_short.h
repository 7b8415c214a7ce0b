// Backward attention of short sequences; included by attention_bwd_body.h, for one ISA.

// A sequence of at most one panel, as in attention_fwd_short.h: scores and dP have a row for each key and a lane for
// each query, so that what belongs to a query is one vector for all keys, and no lane is of a key beyond the last. P^T
// and dS^T are rows here, and dS is read as the transpose of steps of keys.
struct BwdShortMemory {
  char *q_columns, *dout_columns;     // operands of S^T and dP^T
  char *k_copy, *v_copy;              // rows that are no whole steps where they lie
  char *q_rows, *dout_rows, *k_rows;  // steps along the sequence: operands of dk, dv and dq
  char *q_rotated, *k_rotated;        // rows
  float* unrotated;                   // gradients before they are turned back
  float *scores, *dprobs;             // (keys, kPanel)
  char *probs, *dscores;              // the same: left operands of dv and dk
  char* dscores_steps;                // (steps of keys, kPanel): left operand of dq
  char *dq_sums, *dk_sums, *dv_sums;
};

template <typename E, typename T>
BwdShortMemory lay_out_bwd_short(Carver& carver, const AttentionInputs<T>& in, int64_t n) {
  const int64_t dim_panels = (in.head_dim + kPanel - 1) / kPanel,
                columns_bytes = whole_steps<E>(in.head_dim) * kStepBytes;
  const int64_t copy_bytes = lies_ready<E, T>(in.head_dim) ? 0 : n * whole_steps<E>(in.head_dim) * 4;
  const int64_t rows_bytes = dim_panels * steps_of<E>(n) * kStepBytes, square = n * kPanel;
  const bool is_rotated = in.rotary.cos != nullptr;
  const int64_t rotated_bytes = is_rotated ? n * in.head_dim * static_cast<int64_t>(sizeof(T)) : 0;
  BwdShortMemory memory;
  memory.q_columns = carver.take(columns_bytes);
  memory.dout_columns = carver.take(columns_bytes);
  memory.k_copy = carver.take(copy_bytes);
  memory.v_copy = carver.take(copy_bytes);
  memory.q_rows = carver.take(rows_bytes);
  memory.dout_rows = carver.take(rows_bytes);
  memory.k_rows = carver.take(rows_bytes);
  memory.q_rotated = carver.take(rotated_bytes);
  memory.k_rotated = carver.take(rotated_bytes);
  memory.unrotated = carver.take_floats(is_rotated ? n * in.head_dim : 0);
  memory.scores = carver.take_floats(square);
  memory.dprobs = carver.take_floats(square);
  memory.probs = carver.take(square * static_cast<int64_t>(sizeof(E)));
  memory.dscores = carver.take(square * static_cast<int64_t>(sizeof(E)));
  memory.dscores_steps = kPerStep<E> == 1 ? memory.dscores : carver.take(steps_of<E>(n) * kStepBytes);
  memory.dq_sums = carver.take(dim_panels * n * kStepBytes);
  memory.dk_sums = carver.take(dim_panels * n * kStepBytes);
  memory.dv_sums = carver.take(dim_panels * n * kStepBytes);
  return memory;
}

// What is known of the queries, a lane for each.
struct QueryLanes {
  alignas(64) float row_max[kPanel], inverse_sum[kPanel];
};

// Scores and dprobs become the left-hand operands of the three products to come. `counter` is that of the first query's
// first keys. delta as in whole_row.
template <typename E, bool kHasDropout>
FASTBERT_SIMD void column_gradients(const BwdShortMemory& m, int64_t n, const QueryLanes& queries, Floats scale,
                                    const DropoutMask& mask, uint64_t counter, uint64_t counters_per_query) {
  [[maybe_unused]] const Longs every_other_query = multiples(2 * counters_per_query);
  for (int64_t query = 0; query < n; query += kWidth) {
    const Floats row_max = load(queries.row_max + query), inverse_sum = load(queries.inverse_sum + query);
    float *probs = m.scores + query, *dprobs = m.dprobs + query;
    Floats delta = set1(0.0f);
    for (int64_t first = 0; first < n; first += 4) {
      [[maybe_unused]] ColumnMultipliers multipliers;
      if constexpr (kHasDropout) {
        const uint64_t row = counter + static_cast<uint64_t>(query) * counters_per_query;
        multipliers = draw_columns(mask, row + static_cast<uint64_t>(first / 4), counters_per_query, every_other_query);
      }
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; ++i) {
        if (first + i >= n) break;
        const int64_t at = (first + i) * kPanel;
        const Floats p = mul(exp_score<E>(probs + at, row_max, scale, kWidth), inverse_sum);
        Floats dp = load(dprobs + at), dropped = p;
        if constexpr (kHasDropout) {
          dp = mul(dp, multipliers.column[i]), dropped = mul(p, multipliers.column[i]);
          store(dprobs + at, dp);
        }
        store(probs + at, p);
        store(reinterpret_cast<E*>(m.probs) + at + query, dropped);
        delta = fma(p, dp, delta);
      }
    }
    if constexpr (sizeof(E) == 4) {
      Floats rest = set1(0.0f);
      for (int64_t at = 0; at < n * kPanel; at += kPanel) {
        const Floats dp = sub(load(dprobs + at), delta);
        store(dprobs + at, dp);
        rest = fma(load(probs + at), dp, rest);
      }
      delta = rest;
    }
    for (int64_t key = 0; key < n; key += kPerStep<E>) {
      Floats ds[2] = {set1(0.0f), set1(0.0f)};
#pragma GCC unroll 2
      for (int64_t i = 0; i < kPerStep<E>; ++i) {
        if (key + i >= n) break;
        const int64_t at = (key + i) * kPanel;
        ds[i] = mul(load(probs + at), sub(load(dprobs + at), delta));
        store(reinterpret_cast<E*>(m.dscores) + at + query, ds[i]);
      }
      if constexpr (kPerStep<E> > 1) {
        store_step<E>(m.dscores_steps + key / 2 * kStepBytes + query * 4, ds[0], ds[1]);
      }
    }
  }
}

template <typename E, typename T>
void attention_bwd_short(const AttentionBwd<T>& args, const AttentionTask& task) {
  using Dot = typename DotOf<E>::Dot;
  static thread_local Scratch scratch;
  const AttentionInputs<T>& in = args.in;
  const int64_t n = task.length, d = in.head_dim, token = task.first_token, dim_panels = (d + kPanel - 1) / kPanel;
  const int64_t steps = steps_of<E>(n), padded = (n + kWidth - 1) / kWidth * kWidth;
  Carver counting{nullptr};
  lay_out_bwd_short<E>(counting, in, n);
  Carver carver{scratch.get(counting.size)};
  const BwdShortMemory m = lay_out_bwd_short<E>(carver, in, n);
  const DropoutMask mask = DropoutMask::of(in.dropout);
  const uint64_t counters_per_query = static_cast<uint64_t>(in.num_heads) << 32;
  const Floats scale = set1(in.softmax_scale * kLog2e);
  // As in attention_bwd_head.
  const float dscores_scale = n == 1 ? 0.0f : in.softmax_scale;

  for (int64_t head = task.head_begin; head < task.head_end; ++head) {
    const int64_t key_head = in.group == 1 ? head : head / in.group;
    const bool is_first_of_keys = in.group == 1 || head % in.group == 0;
    const bool is_last_of_keys = in.group == 1 || (head + 1) % in.group == 0;
    const bool has_next = head + 1 < task.head_end, has_next_keys = has_next && is_last_of_keys;
    if (has_next) {
      fetch_rows(args.dout, token, n, head + 1, d);
    }
    const T *v = in.v.at(token, key_head), *dout = args.dout.at(token, head);
    const int64_t dout_stride = args.dout.token_stride;
    const auto q = rotated(in, in.q, token, 0, n, head, m.q_rotated);
    const auto k = rotated(in, in.k, token, 0, n, key_head, m.k_rotated);

    // Lanes beyond the last query are as that one, or at least numbers: what they make meets zeros.
    QueryLanes queries;
    const float* stats = args.softmax_stats + head * args.total_tokens + token;
    for (int64_t r = 0; r < padded; ++r) {
      const int64_t query = std::min(r, n - 1);
      queries.row_max[r] = stats[query];
      queries.inverse_sum[r] = 1.0f / stats[query + in.num_heads * args.total_tokens];
    }

    pack_columns<E>(q.data, q.stride, n, d, m.q_columns);
    pack_columns<E>(dout, dout_stride, n, d, m.dout_columns);
    const Left k_left = left_rows<E>(k.data, k.stride, n, d, m.k_copy);
    const Left v_left = left_rows<E>(v, in.v.token_stride, n, d, m.v_copy);
    vector_product<Dot>(n, k_left.data, k_left.stride, 4, m.q_columns, whole_steps<E>(d), n, false,
                        reinterpret_cast<char*>(m.scores));
    if (has_next) fetch_rows(in.q, token, n, head + 1, d);
    if (has_next_keys) fetch_rows(in.k, token, n, key_head + 1, d);
    vector_product<Dot>(n, v_left.data, v_left.stride, 4, m.dout_columns, whole_steps<E>(d), n, false,
                        reinterpret_cast<char*>(m.dprobs));
    if (has_next_keys) fetch_rows(in.v, token, n, key_head + 1, d);
    if (has_next) fetch_rows(args.dq, token, n, head + 1, d);
    pack_rows<E>(q.data, q.stride, n, d, steps, m.q_rows);
    pack_rows<E>(dout, dout_stride, n, d, steps, m.dout_rows);
    pack_rows<E>(k.data, k.stride, n, d, steps, m.k_rows);
    const uint64_t counter = static_cast<uint64_t>(token * in.num_heads + head) << 32;
    if (in.dropout.p > 0.0) {
      column_gradients<E, true>(m, n, queries, scale, mask, counter, counters_per_query);
    } else {
      column_gradients<E, false>(m, n, queries, scale, mask, counter, counters_per_query);
    }
    if (has_next_keys) {
      fetch_rows(args.dk, token, n, key_head + 1, d);
      fetch_rows(args.dv, token, n, key_head + 1, d);
    }
    constexpr int64_t kRowBytes = kPanel * static_cast<int64_t>(sizeof(E));
    for (int64_t p = 0; p < dim_panels; ++p) {
      const int64_t dims = std::min(kPanel, d - p * kPanel), panel = p * steps * kStepBytes, at = p * n * kStepBytes;
      vector_product<Dot>(n, m.probs, kRowBytes, 4, m.dout_rows + panel, steps, dims, !is_first_of_keys,
                          m.dv_sums + at);
      vector_product<Dot>(n, m.dscores, kRowBytes, 4, m.q_rows + panel, steps, dims, !is_first_of_keys, m.dk_sums + at);
      vector_product<Dot>(n, m.dscores_steps, 4, kStepBytes, m.k_rows + panel, steps, dims, false, m.dq_sums + at);
    }
    const auto write = [&](const char* sums, T* out, int64_t stride) {
      if (in.rotary.cos == nullptr) return write_rows(sums, n, &dscores_scale, 0, n, d, out, stride);
      write_rows(sums, n, &dscores_scale, 0, n, d, m.unrotated, d);
      rotate_rows(in.rotary, token, 0, -1.0f, m.unrotated, d, n, d, out, stride);
    };
    write(m.dq_sums, args.dq.at(token, head), args.dq.token_stride);
    if (!is_last_of_keys) continue;
    constexpr float kOne = 1.0f;
    write(m.dk_sums, args.dk.at(token, key_head), args.dk.token_stride);
    write_rows(m.dv_sums, n, &kOne, 0, n, d, args.dv.at(token, key_head), args.dv.token_stride);
  }
}
