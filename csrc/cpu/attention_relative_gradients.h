// From the gradients of a square's scores to those of relative terms; included by attention_bwd_heads.h, for one ISA.
//
// With each row moved to where its distances are, dS is a band: row r has column c at c - r + kBlock - 1, of 2 kBlock
// distances, and zeros beside it. The gradient of the square's rows is the band's product with the table, and that of
// the table its transpose's with the square's rows. Both leave out nearly all of the zeros. What belongs to the rows is
// made of dS so, and what belongs to the columns of its transpose.

constexpr int64_t kBand = 2 * kBlock;
// Rows that share a product: of as many distances as all of them have.
template <typename E>
constexpr int64_t kBandRows = kUsesAmx<typename DotOf<E>::Dot> ? kAmxRows : kTileRows;

struct BwdTerms {
  const RelativeTerms* relative;
  RelativeSums sums;      // of the head and the group of sequences
  const int32_t* places;  // of the sequence's tokens; null where they follow each other
  const float* bias;      // of distance 0
  TileTerms tables;       // its columns are the keys of one block
  const char *key_rows, *query_rows;
  float* space;
  char* k_copy;     // one key block
  char* band;       // (kBlock, kBand)
  char* pairs;      // steps along the band's rows, a distance in each four bytes: its transpose as a left operand
  float* gathered;  // the band before it is rounded, where places have holes
  char *k_turned, *dk_sums;  // AMX: one key block's rows of dims, and what the terms add to dk, not turned over
  int64_t k_turned_stride;
};

template <typename E, typename T>
BwdTerms lay_out_bwd_terms(Carver& carver, const AttentionInputs<T>& in, const RelativeTerms& relative) {
  constexpr bool kIsAmx = kUsesAmx<typename DotOf<E>::Dot>;
  BwdTerms terms{};
  terms.relative = &relative;
  terms.band = carver.take(kBlock * kBand * static_cast<int64_t>(sizeof(E)));
  terms.pairs = kPerStep<E> == 1 ? terms.band : carver.take(kBlock / kPerStep<E> * kBand * 4);
  terms.gathered = carver.take_floats(relative.places == nullptr ? 0 : kBlock * kBand);
  terms.space = carver.take_floats(kTermSpace);
  terms.k_copy = carver.take(lies_ready<E, T>(in.head_dim) ? 0 : kBlock * whole_steps<E>(in.head_dim) * 4);
  terms.k_turned_stride = kBlock / kPerStep<E> * 4 + 64;  // as BwdMemory's columns_stride
  terms.k_turned = carver.take(kIsAmx ? (in.head_dim + kPanel - 1) / kPanel * kPanel * terms.k_turned_stride : 0);
  terms.dk_sums = carver.take(kIsAmx ? key_sums_bytes(in) : 0);
  return terms;
}

// The band's zeros stay: a square writes its own part of each row, zeros beyond its columns.
template <typename E>
void clear_band(const BwdTerms& terms) {
  std::memset(terms.band, 0, static_cast<size_t>(kBlock * kBand) * sizeof(E));
  if constexpr (kPerStep<E> > 1) std::memset(terms.pairs, 0, static_cast<size_t>(kBlock / kPerStep<E> * kBand * 4));
}

template <typename E>
FASTBERT_SIMD E* band_row(const BwdTerms& terms, int64_t r) {
  return reinterpret_cast<E*>(terms.band) + r * kBand + kBlock - 1 - r;
}

// Of dS, rows kPanel apart.
template <typename E>
void fill_band(const BwdTerms& terms, const E* dscores, int64_t rows, int64_t columns) {
  constexpr auto kBytes = static_cast<size_t>(kBlock) * sizeof(E);
  const int64_t written = std::min(kBlock, (columns + kWidth - 1) / kWidth * kWidth);  // of dS: whole vectors
  for (int64_t r = 0; r < rows; ++r) {
    E* to = band_row<E>(terms, r);
    if (written == kBlock) {
      std::memcpy(to, dscores + r * kPanel, kBytes);
    } else {
      std::memcpy(to, dscores + r * kPanel, static_cast<size_t>(written) * sizeof(E));
      std::memset(to + written, 0, kBytes - static_cast<size_t>(written) * sizeof(E));
    }
  }
}

// A square of steps of dS, of which `steps` and `columns` are there, to the band's rows. Not inlined: see pack_square.
template <typename E>
__attribute__((noinline)) void turn_into_band(const BwdTerms& terms, const char* from, int64_t steps,
                                              int64_t first_step, int64_t column, int64_t columns) {
  Ints block[kWidth];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kWidth; ++i) {
    block[i] = i < steps ? load(reinterpret_cast<const int32_t*>(from + i * kStepBytes)) : set1(0);
  }
  transpose(block);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kWidth; ++i) {
    E* to = band_row<E>(terms, column + i) + first_step * kPerStep<E>;
    if (i < columns) store(reinterpret_cast<int32_t*>(to), block[i]);
  }
}

// Of dS^T, where dS lies in steps of its rows.
template <typename E>
void fill_band_turned(const BwdTerms& terms, const char* dscores_pairs, int64_t rows, int64_t columns) {
  for (int64_t step = 0; step < kBlock / kPerStep<E>; step += kWidth) {
    for (int64_t c = 0; c < columns; c += kWidth) {
      turn_into_band<E>(terms, dscores_pairs + step * kStepBytes + c * 4, steps_of<E>(rows) - step, step, c,
                        std::min(kWidth, columns - c));
    }
  }
}

// Where steps of `pairs` are.
template <typename E>
FASTBERT_SIMD char* pairs_at(const BwdTerms& terms, int64_t step, int64_t distance) {
  if constexpr (kUsesAmx<typename DotOf<E>::Dot>) {
    const int64_t panel = distance / kPanel * (kBlock / kPerStep<E>);
    return terms.pairs + (panel + step) * kStepBytes + distance % kPanel * 4;
  }
  return terms.pairs + (step * kBand + distance) * 4;
}

// Behind the band's `rows` rows: zeros up to whole steps, and the pairs. kIsShifted: all else than the band is zero.
template <typename E, bool kIsShifted>
void end_band(const BwdTerms& terms, int64_t rows) {
  const int64_t whole = whole_steps<E>(rows) * kPerStep<E>;
  for (int64_t r = rows; r < whole; ++r) {
    std::memset(reinterpret_cast<E*>(terms.band) + r * kBand, 0, static_cast<size_t>(kBand) * sizeof(E));
  }
#if defined(FASTBERT_BF16)
  if constexpr (kPerStep<E> == 2) {
    for (int64_t r = 0; r < whole; r += 2) {
      const E* row = reinterpret_cast<const E*>(terms.band) + r * kBand;
      const int64_t begin = kIsShifted ? (kBlock - 2 - r) / kWidth * kWidth : 0,
                    end = kIsShifted ? kBand - 1 - r : kBand;
      for (int64_t i = begin; i < end; i += kWidth) {
        store(reinterpret_cast<int32_t*>(pairs_at<E>(terms, r / 2, i)), pair_bf16(row + i, row + kBand + i));
      }
    }
  }
#endif
}

// One of both sides of a square: its rows, the table that they meet, and where the gradients are summed.
struct BandSide {
  int64_t rows, columns;
  bool is_shifted;  // else of `distances` distances each row has any
  int64_t distances;
  const char* table_rows;  // from the band's first distance on; null: there is no such term
  int64_t table_steps;     // of a panel of dims
  char* sums;              // of the rows, (panels of dims, ..., kPanel)
  int64_t sums_stride;     // bytes from panel to panel
  const char* x_rows;      // the rows of the other table's gradient, packed: (panels of dims, steps along them, kPanel)
  int64_t x_steps;
  const char* x_columns;  // AMX: the same as rows of dims
  int64_t x_stride;
  char* table_sums;  // from the band's first distance on; as table_rows, AMX: panels turned over
  float* bias_sums;  // null: there is no such term
};

// Row sums += band * table.
template <typename E>
void add_to_rows(AmxTiles& tiles, const BwdTerms& terms, const BandSide& side, int64_t d) {
  using Dot = typename DotOf<E>::Dot;
  for (int64_t r = 0; r < side.rows; r += kBandRows<E>) {
    const int64_t height = std::min(kBandRows<E>, side.rows - r);
    const int64_t first = kUsesAmx<Dot> ? kBlock - kBandRows<E> - r : (kBlock - r - height) / kPerStep<E> * kPerStep<E>;
    const int64_t begin = side.is_shifted ? first : 0;
    const int64_t end = side.is_shifted ? kBlock - 1 - r + side.columns : side.distances;
    const char* left = terms.band + (r * kBand + begin) * static_cast<int64_t>(sizeof(E));
    for (int64_t p = 0; p * kPanel < d; ++p) {
      product<Dot>(tiles, height, left, kBand * static_cast<int64_t>(sizeof(E)),
                   side.table_rows + (p * side.table_steps + begin / kPerStep<E>)*kStepBytes,
                   whole_steps<E>(end - begin), std::min(kPanel, d - p * kPanel), true,
                   side.sums + p * side.sums_stride + r * kStepBytes);
    }
  }
}

// The table's sums += band^T * rows.
template <typename E>
void add_to_table(AmxTiles& tiles, const BwdTerms& terms, const BandSide& side, int64_t d) {
  using Dot = typename DotOf<E>::Dot;
  constexpr int64_t kHeight = kUsesAmx<Dot> ? kAmxRows : kTileRows;
  const int64_t whole = whole_steps<E>(side.rows) * kPerStep<E>;
  const int64_t first = side.is_shifted && !kUsesAmx<Dot> ? kBlock - side.rows : 0;
  const int64_t end = side.is_shifted ? kBlock - 1 + side.columns : side.distances;
  for (int64_t u = first; u < end; u += kHeight) {
    const int64_t height = std::min(kHeight, end - u);
    // Which rows have any of these distances, in whole steps.
    constexpr int64_t kRows = kStepGroup<E> * kPerStep<E>;
    const int64_t row = side.is_shifted ? std::max<int64_t>(0, kBlock - u - height) / kRows * kRows : 0;
    const int64_t row_end = side.is_shifted ? std::min(whole, kBlock - 1 - u + side.columns) : whole;
    if (row >= row_end) continue;
    const int64_t steps = whole_steps<E>(row_end - row);
    for (int64_t p = 0; p * kPanel < d; ++p) {
      const int64_t dims = std::min(kPanel, d - p * kPanel);
      if constexpr (kUsesAmx<Dot>) {
        product<Dot>(
            tiles, dims, side.x_columns + p * kPanel * side.x_stride + row / kPerStep<E> * 4, side.x_stride,
            pairs_at<E>(terms, row / kPerStep<E>, u), steps, kHeight, true,
            side.table_sums + (p * side.table_steps * kPerStep<E> + u / kPanel * kPanel) * kStepBytes + u % kPanel * 4);
      } else {
        vector_product<Dot>(height, pairs_at<E>(terms, row / kPerStep<E>, u), 4, kBand * 4,
                            side.x_rows + (p * side.x_steps + row / kPerStep<E>)*kStepBytes, steps, dims, true,
                            side.table_sums + (p * side.table_steps * kPerStep<E> + u) * kStepBytes);
      }
    }
  }
}

template <typename E>
void add_to_bias(const BwdTerms& terms, const BandSide& side) {
  constexpr int64_t kChain = 8;
  for (int64_t u = 0; u < (side.is_shifted ? kBand : side.distances); u += kWidth) {
    const int64_t begin = side.is_shifted ? std::max<int64_t>(0, kBlock - u - kWidth) : 0;
    const int64_t end = side.is_shifted ? std::min(side.rows, kBand - 1 - u) : side.rows;
    Floats total = set1(0.0f);
    for (int64_t r = begin; r < end; r += kChain) {
      Floats chain = set1(0.0f);
      for (int64_t i = r; i < std::min(r + kChain, end); ++i) {
        chain = add(chain, load(reinterpret_cast<const E*>(terms.band) + i * kBand + u));
      }
      total = add(total, chain);
    }
    store(side.bias_sums + u, add(load(side.bias_sums + u), total));
  }
}

template <typename E>
void add_band(AmxTiles& tiles, const BwdTerms& terms, const BandSide& side, int64_t d) {
  if (side.table_rows != nullptr) {
    add_to_rows<E>(tiles, terms, side, d);
    add_to_table<E>(tiles, terms, side, d);
  }
  if (side.bias_sums != nullptr) add_to_bias<E>(terms, side);
}

// The same of a side whose places have holes, by 2 kBlock distances of the table at a time; `side` is for its first
// distance. at(r, c) is dS.
template <typename E, typename F>
void add_gathered(AmxTiles& tiles, const BwdTerms& terms, BandSide side, int64_t d, int64_t first, int64_t panels,
                  const int32_t* row_places, const int32_t* column_places, const F& at) {
  const auto column_of = [&](int64_t r, int64_t c) {
    return std::clamp<int64_t>(column_places[c] - row_places[r] - first, 0, panels * kPanel - 1);
  };
  side.is_shifted = false;
  const int64_t begin = column_of(side.rows - 1, 0) / kPanel * kPanel, end = column_of(0, side.columns - 1) + 1;
  const char* table_rows = side.table_rows;
  char* table_sums = side.table_sums;
  float* bias_sums = side.bias_sums;
  for (int64_t from = begin; from < end; from += kBand) {
    side.distances = std::min(kBand, panels * kPanel - from);
    std::memset(terms.gathered, 0, static_cast<size_t>(side.rows * kBand) * 4);
    for (int64_t r = 0; r < side.rows; ++r) {
      for (int64_t c = 0; c < side.columns; ++c) {
        const int64_t u = column_of(r, c) - from;
        if (u >= 0 && u < side.distances) terms.gathered[r * kBand + u] += at(r, c);
      }
    }
    for (int64_t i = 0; i < side.rows * kBand; i += kWidth) {
      store(reinterpret_cast<E*>(terms.band) + i, load(terms.gathered + i));
    }
    end_band<E, false>(terms, side.rows);
    if (table_rows != nullptr) {
      side.table_rows = table_rows + from / kPerStep<E> * kStepBytes;
      side.table_sums = table_sums + from * kStepBytes;
    }
    if (bias_sums != nullptr) side.bias_sums = bias_sums + from;
    add_band<E>(tiles, terms, side, d);
  }
}

template <typename E, typename T>
void begin_bwd_head(BwdTerms& terms, const AttentionInputs<T>& in, int64_t head, const Left& q) {
  const RelativeTerms& relative = *terms.relative;
  const int64_t dim_panels = (in.head_dim + kPanel - 1) / kPanel;
  const auto rows_of_head = [&](const DistanceTable& table) -> const char* {
    if (table.columns == nullptr) return nullptr;
    return table.rows + head * dim_panels * (table.panels * kPanel / kPerStep<E>)*kStepBytes;
  };
  terms.tables = {
      table_of_head<E>(relative.key, head, in.head_dim), table_of_head<E>(relative.query, head, in.head_dim), q, {}};
  terms.key_rows = rows_of_head(relative.key), terms.query_rows = rows_of_head(relative.query);
  terms.bias = relative.bias == nullptr ? nullptr : relative.bias + head * relative.bias_stride + relative.reach - 1;
}

// `k` are the keys of the block where they lie, in memory.k_rows packed.
template <typename E, typename T>
void begin_key_block(BwdTerms& terms, [[maybe_unused]] const BwdMemory& memory, const StridedRows<T>& k, int64_t keys,
                     int64_t d) {
  if (terms.query_rows == nullptr) return;
  terms.tables.columns = left_rows<E>(k.data, k.stride, keys, d, terms.k_copy);
#if defined(FASTBERT_AMX)
  if constexpr (kUsesAmx<typename DotOf<E>::Dot>) {
    for (int64_t p = 0; p * kPanel < d; ++p) {
      amx_transpose(memory.k_rows + p * (kBlock / kPerStep<E>)*kStepBytes, whole_steps<E>(keys),
                    std::min(kPanel, d - p * kPanel), terms.k_turned_stride,
                    terms.k_turned + p * kPanel * terms.k_turned_stride);
      std::memset(terms.dk_sums + p * kBlock * kStepBytes, 0, kBlock * kStepBytes);
    }
  }
#endif
}

// What the terms add to the scores of a square.
template <typename E>
void begin_square(AmxTiles& tiles, const BwdTerms& terms, int64_t query, int64_t rows, int64_t key, int64_t keys,
                  float* scores) {
  TileTerms tile = terms.tables;
  tile.rows.data += query * tile.rows.stride;
  if (terms.places == nullptr) return tile_terms<E>(tiles, tile, rows, keys, key - query, terms.space, {scores, 0, 0});
  gathered_terms<E>(tiles, tile, rows, keys, terms.places + query, terms.places + key, terms.space, {scores, 0, 0});
}

template <typename E>
void end_square(const BwdTerms& terms, int64_t query, int64_t rows, int64_t key, int64_t keys, float softmax_scale,
                float* scores) {
  if (terms.bias == nullptr) return;
  if (terms.places == nullptr) return add_bias(rows, keys, terms.bias + key - query, softmax_scale, {scores, 0, 0});
  add_bias_of_places(rows, keys, terms.places + query, terms.places + key, terms.bias, softmax_scale, {scores, 0, 0});
}

// The gradients of a square, added to those of queries in dq_sums, of keys in dk_sums, and of the tables.
template <typename E>
void add_square(AmxTiles& tiles, const BwdTerms& terms, const BwdMemory& memory, int64_t query, int64_t rows,
                int64_t rows_total, int64_t key, int64_t keys, int64_t d, char* dk_sums) {
  const RelativeTerms& relative = *terms.relative;
  const bool is_shifted = terms.places == nullptr;
  const int64_t block_steps = kBlock / kPerStep<E>, row_steps = whole_steps<E>(rows_total);
  const E* dscores = reinterpret_cast<const E*>(memory.dscores);
  // Where the square's band begins in a table; clamped ones are like the last that the table has.
  const auto band_begin = [&](const DistanceTable& table, int64_t distance) {
    return is_shifted ? std::clamp<int64_t>(distance + 1 - kBlock - table.first, 0, (table.panels - 2) * kPanel) : 0;
  };
  if (terms.key_rows != nullptr || terms.bias != nullptr) {
    const int64_t begin = band_begin(relative.key, key - query);
    const BandSide side{rows,
                        keys,
                        is_shifted,
                        0,
                        terms.key_rows == nullptr ? nullptr : terms.key_rows + begin / kPerStep<E> * kStepBytes,
                        relative.key.panels * block_steps,
                        memory.dq_sums + query * kStepBytes,
                        rows_total * kStepBytes,
                        memory.q_rows + query / kPerStep<E> * kStepBytes,
                        row_steps,
                        memory.q_columns + query / kPerStep<E> * 4,
                        memory.columns_stride,
                        terms.sums.key + begin * kStepBytes,
                        terms.bias == nullptr ? nullptr : terms.sums.bias + begin};
    if (is_shifted) {
      fill_band<E>(terms, dscores, rows, keys);
      end_band<E, true>(terms, rows);
      add_band<E>(tiles, terms, side, d);
    } else {
      add_gathered<E>(tiles, terms, side, d, relative.key.first, relative.key.panels, terms.places + query,
                      terms.places + key, [&](int64_t r, int64_t c) { return to_float(dscores[r * kPanel + c]); });
    }
  }
  if (terms.query_rows == nullptr) return;
  const int64_t begin = band_begin(relative.query, query - key);
  const BandSide side{keys,
                      rows,
                      is_shifted,
                      0,
                      terms.query_rows + begin / kPerStep<E> * kStepBytes,
                      relative.query.panels * block_steps,
                      kUsesAmx<typename DotOf<E>::Dot> ? terms.dk_sums : dk_sums,
                      kBlock * kStepBytes,
                      memory.k_rows,
                      block_steps,
                      terms.k_turned,
                      terms.k_turned_stride,
                      terms.sums.query + begin * kStepBytes,
                      nullptr};
  if (is_shifted) {
    fill_band_turned<E>(terms, memory.dscores_pairs, rows, keys);
    end_band<E, true>(terms, keys);
    add_band<E>(tiles, terms, side, d);
  } else {
    add_gathered<E>(tiles, terms, side, d, relative.query.first, relative.query.panels, terms.places + key,
                    terms.places + query, [&](int64_t r, int64_t c) { return to_float(dscores[c * kPanel + r]); });
  }
}

// With AMX dk lies turned over, and what the terms add does not.
template <typename E>
void end_key_block([[maybe_unused]] const BwdTerms& terms, [[maybe_unused]] int64_t keys, [[maybe_unused]] int64_t d,
                   [[maybe_unused]] char* dk_sums) {
#if defined(FASTBERT_AMX)
  if constexpr (kUsesAmx<typename DotOf<E>::Dot>) {
    if (terms.query_rows == nullptr) return;
    for (int64_t p = 0; p * kPanel < d; ++p) {
      const int64_t dims = std::min(kPanel, d - p * kPanel), at = p * kBlock * kStepBytes;
      amx_transpose(terms.dk_sums + at, keys, dims, kStepBytes, reinterpret_cast<char*>(terms.space));
      auto* sums = reinterpret_cast<float*>(dk_sums + at);
      for (int64_t i = 0; i < dims * kPanel; i += kWidth) store(sums + i, add(load(sums + i), load(terms.space + i)));
    }
  }
#endif
}

// Sums of a table as add_to_table leaves them become rows by distance.
template <typename E>
void turn_sums([[maybe_unused]] const BwdTerms& terms, [[maybe_unused]] char* sums, [[maybe_unused]] int64_t blocks) {
#if defined(FASTBERT_AMX)
  if constexpr (kUsesAmx<typename DotOf<E>::Dot>) {
    auto* space = reinterpret_cast<char*>(terms.space);
    for (int64_t i = 0; i < blocks; ++i, sums += kPanel * kStepBytes) {
      amx_transpose(sums, kPanel, kPanel, kStepBytes, space);
      std::memcpy(sums, space, kPanel * kStepBytes);
    }
  }
#endif
}
