// What relative terms add to the scores of a tile; included by attention_fwd_heads.h and attention_bwd_heads.h, once
// per ISA. A tile's rows and columns are queries and keys, or keys and queries.
//
// A row's term is its product with the table's columns of all distances from the tile's columns, one run of them; the
// next row's run begins one column earlier. The columns' term is made so too, a row for each of the tile's columns, and
// turned over by squares. Several rows share one product, of the runs of all of them.

constexpr int64_t kTermRows = kUsesAmx<typename DotOf<BFloat16>::Dot> ? kAmxRows : 12;
// Of columns that are turned over at once: whole squares, in whole tiles.
constexpr int64_t kTermColumns = kUsesAmx<typename DotOf<BFloat16>::Dot> ? kAmxRows : kWidth == 16 ? 16 : 24;
// The most columns of a tile, and floats from one row of products to the next: runs, what they are rounded up to, and
// an odd number of cache lines.
constexpr int64_t kTermBlock = 256, kTermStride = 336;
// Of a tile: few enough that its scores, over which four passes go, stay near the first-level cache.
constexpr int64_t kMostRows = 64;
constexpr int64_t kTermSpace = std::max(kTermRows, kTermColumns) * kTermStride;  // floats
static_assert(kTermColumns % kWidth == 0 && kTermStride >= kTermBlock + kAmxRows - 1 + 2 * 16);

// The columns of one head's table.
struct TermTable {
  const char* columns;  // null: there is no such term
  int64_t first, panels, steps;

  FASTBERT_SIMD int64_t end() const { return first + panels * kPanel; }
};

template <typename E>
FASTBERT_SIMD TermTable table_of_head(const DistanceTable& table, int64_t head, int64_t head_dim) {
  const int64_t steps = whole_steps<E>(head_dim);
  const char* columns = table.columns;
  return {columns == nullptr ? nullptr : columns + head * table.panels * steps * kStepBytes, table.first, table.panels,
          steps};
}

// Of tiles: what their scores begin with. The columns of a tile are those from `shift` on of panels `panel_stride`
// floats apart, in which rows are kPanel apart.
struct TileScores {
  float* scores;
  int64_t panel_stride, shift;

  FASTBERT_SIMD float* at(int64_t row, int64_t column) const {
    const int64_t c = shift + column;
    return scores + c / kPanel * panel_stride + row * kPanel + c % kPanel;
  }

  // f(where they lie, the first, how many) for the columns of a row from `begin` to `end`, those of a panel at a time.
  template <typename F>
  FASTBERT_SIMD void by_panel(int64_t row, int64_t begin, int64_t end, const F& f) const {
    for (int64_t count; begin < end; begin += count) {
      count = std::min(kPanel - (shift + begin) % kPanel, end - begin);
      f(at(row, begin), begin, count);
    }
  }
};

// space (rows, kTermStride) = products of `rows` rows with `count` columns from number `begin` on. A product writes
// whole vectors: the next one's columns come after it.
template <typename E>
void table_products(AmxTiles& tiles, int64_t rows, const Left& left, const TermTable& table, int64_t begin,
                    int64_t count, float* space) {
  for (const int64_t end = begin + count; begin < end;) {
    const int64_t skipped = begin % kPanel, width = std::min(kPanel - skipped, end - begin);
    product<typename DotOf<E>::Dot, kTermStride * 4>(
        tiles, rows, left.data, left.stride, table.columns + begin / kPanel * table.steps * kStepBytes + skipped * 4,
        table.steps, width, false, reinterpret_cast<char*>(space));
    begin += width, space += width;
  }
}

// The products of `rows` rows, by tiles of kRows, with the distances distance - r + c of the columns c from 0 to
// `columns`: run_of finds a row's run. A tile whose distances are all clamped, to one row, is moved to the
// table's end.
template <typename E, int64_t kRows>
void run_products(AmxTiles& tiles, int64_t rows, const Left& left, const TermTable& table, int64_t distance,
                  int64_t columns, float* space) {
  for (int64_t row = 0; row < rows; row += kRows) {
    const int64_t last = std::min(kRows, rows - row) - 1, count = columns + last;
    const int64_t begin = std::clamp(distance - row - last, table.first, table.end() - count) - table.first;
    table_products<E>(tiles, last + 1, {left.data + row * left.stride, left.stride}, table, begin, count,
                      space + row * kTermStride);
  }
}

template <int64_t kRows>
FASTBERT_SIMD const float* run_of(const float* space, int64_t rows, int64_t row) {
  return space + row * kTermStride + std::min(row / kRows * kRows + kRows, rows) - 1 - row;
}

// The rows' terms are added to what is there if `adds`.
template <typename E>
void row_terms(AmxTiles& tiles, int64_t rows, const Left& left, const TermTable& table, int64_t distance,
               int64_t columns, bool adds, float* space, const TileScores& scores) {
  for (int64_t row = 0; row < rows; row += kTermRows) {
    const int64_t height = std::min(kTermRows, rows - row);
    run_products<E, kTermRows>(tiles, height, {left.data + row * left.stride, left.stride}, table, distance - row,
                               columns, space);
    for (int64_t r = 0; r < height; ++r) {
      const float* run = run_of<kTermRows>(space, height, r);
      scores.by_panel(row + r, 0, columns, [&](float* to, int64_t first, int64_t count) {
        const float* from = run + first;
        for (int64_t c = 0; c < count; c += kWidth) {
          // Zeros beyond the last column, where nothing has been computed.
          const Floats x = count - c >= kWidth ? load(from + c) : load_columns(from + c, count - c);
          store(to + c, adds ? add(load(to + c), x) : x);
        }
      });
    }
  }
}

// A square of products, of which `columns` rows are there, turned over into `rows` rows. Not inlined: see pack_square.
template <int64_t kRows>
__attribute__((noinline)) void turn_square(const float* space, int64_t space_rows, int64_t column, int64_t row,
                                           int64_t rows, const TileScores& scores, int64_t first_column) {
  Ints block[kWidth];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kWidth; ++i) {
    const int64_t c = column + i;
    block[i] = c < space_rows ? (Ints)load(run_of<kRows>(space, space_rows, c) + row) : set1(0);
  }
  transpose(block);
  float* to = scores.at(row, first_column + column);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kWidth; ++i) {
    if (i < rows) store(reinterpret_cast<int32_t*>(to + i * kPanel), block[i]);
  }
}

// The columns' terms. `distance` is that of row 0 and column 0 as the table of columns counts.
template <typename E>
void column_terms(AmxTiles& tiles, int64_t rows, int64_t columns, const Left& left, const TermTable& table,
                  int64_t distance, float* space, const TileScores& scores) {
  constexpr int64_t kRows = std::min(kTermColumns, kWidth == 16 ? kTermColumns : kTermRows);
  for (int64_t column = 0; column < columns; column += kTermColumns) {
    const int64_t width = std::min(kTermColumns, columns - column);
    run_products<E, kRows>(tiles, width, {left.data + column * left.stride, left.stride}, table, distance - column,
                           rows, space);
    for (int64_t c = 0; c < width; c += kWidth) {
      for (int64_t row = 0; row < rows; row += kWidth) {
        turn_square<kRows>(space, width, c, row, std::min(kWidth, rows - row), scores, column);
      }
    }
  }
}

// What both have of a tile whose first row and column are `distance` apart.
struct TileTerms {
  TermTable of_rows, of_columns;
  Left rows, columns;
};

template <typename E>
void tile_terms(AmxTiles& tiles, const TileTerms& terms, int64_t rows, int64_t columns, int64_t distance, float* space,
                const TileScores& scores) {
  const bool has_columns = terms.of_columns.columns != nullptr;
  if (has_columns) {
    column_terms<E>(tiles, rows, columns, terms.columns, terms.of_columns, -distance, space, scores);
  }
  if (terms.of_rows.columns != nullptr) {
    row_terms<E>(tiles, rows, terms.rows, terms.of_rows, distance, columns, has_columns, space, scores);
  }
}

// add(row, column, product) for every row and column of a tile that have any places, ascending ones: by as many columns
// of the table as the space holds, of which each place takes its own.
template <typename E, typename F>
void gathered_products(AmxTiles& tiles, int64_t rows, const Left& left, const TermTable& table,
                       const int32_t* row_places, int64_t columns, const int32_t* column_places, float* space,
                       const F& add) {
  const auto column_of = [&](int64_t r, int64_t c) {
    return std::clamp<int64_t>(column_places[c] - row_places[r], table.first, table.end() - 1) - table.first;
  };
  for (int64_t row = 0; row < rows; row += kTermRows) {
    const int64_t height = std::min(kTermRows, rows - row), end = column_of(row, columns - 1) + 1;
    for (int64_t begin = column_of(row + height - 1, 0); begin < end; begin += kTermBlock) {
      const int64_t count = std::min(kTermBlock, end - begin);
      table_products<E>(tiles, height, {left.data + row * left.stride, left.stride}, table, begin, count, space);
      for (int64_t r = 0; r < height; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
          const int64_t at = column_of(row + r, c) - begin;
          if (at >= 0 && at < count) add(row + r, c, space[r * kTermStride + at]);
        }
      }
    }
  }
}

template <typename E>
void gathered_terms(AmxTiles& tiles, const TileTerms& terms, int64_t rows, int64_t columns, const int32_t* row_places,
                    const int32_t* column_places, float* space, const TileScores& scores) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; c += kWidth) store(scores.at(r, c), set1(0.0f));
  }
  if (terms.of_rows.columns != nullptr) {
    gathered_products<E>(tiles, rows, terms.rows, terms.of_rows, row_places, columns, column_places, space,
                         [&](int64_t r, int64_t c, float x) { *scores.at(r, c) += x; });
  }
  if (terms.of_columns.columns != nullptr) {
    gathered_products<E>(tiles, columns, terms.columns, terms.of_columns, column_places, rows, row_places, space,
                         [&](int64_t c, int64_t r, float x) { *scores.at(r, c) += x; });
  }
}

// out[r] = the product of row r with one column of the table.
template <typename E>
void end_products(AmxTiles& tiles, int64_t rows, const Left& left, const TermTable& table, int64_t distance,
                  float* space, float* out) {
  for (int64_t row = 0; row < rows; row += kTermRows) {
    const int64_t height = std::min(kTermRows, rows - row);
    table_products<E>(tiles, height, {left.data + row * left.stride, left.stride}, table, distance - table.first, 1,
                      space);
    for (int64_t r = 0; r < height; ++r) out[row + r] = space[r * kTermStride];
  }
}

// Scores become scaled ones with a bias; `bias` is that of row 0 and column 0, ascending by columns. Where `row_maxima`
// are wanted, each row's has the row's largest score in one of its lanes: as softmax_rows finds them, while they are
// there.
FASTBERT_SIMD void add_bias(int64_t rows, int64_t columns, const float* bias, float softmax_scale,
                            const TileScores& scores, float (*row_maxima)[kWidth] = nullptr) {
  constexpr int64_t kVectors = kPanel / kWidth;
  const Floats scale = set1(softmax_scale);
  for (int64_t r = 0; r < rows; ++r) {
    Floats lane_max[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) lane_max[v] = set1(-__builtin_inff());
    scores.by_panel(r, 0, columns, [&](float* at, int64_t first, int64_t count) {
      const float* of_row = bias - r + first;
      const auto add_at = [&](int64_t c) {
        const Floats x = fma(load(at + c), scale, load(of_row + c));
        store(at + c, x);
        return x;
      };
      if (count == kPanel) {
#pragma GCC unroll 8
        for (int64_t v = 0; v < kVectors; ++v) lane_max[v] = max(lane_max[v], add_at(v * kWidth));
        return;
      }
      for (int64_t c = 0; c < count; c += kWidth) lane_max[0] = max(lane_max[0], add(add_at(c), beyond(count - c)));
    });
    if (row_maxima == nullptr) continue;
    for (int64_t v = 1; v < kVectors; ++v) lane_max[0] = max(lane_max[0], lane_max[v]);
    store(row_maxima[r], lane_max[0]);
  }
}

// The same where places have holes; `bias` is that of distance 0.
FASTBERT_SIMD void add_bias_of_places(int64_t rows, int64_t columns, const int32_t* row_places,
                                      const int32_t* column_places, const float* bias, float softmax_scale,
                                      const TileScores& scores) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      float* at = scores.at(r, c);
      *at = *at * softmax_scale + bias[column_places[c] - row_places[r]];
    }
  }
}

// What the scores of a sequence of at most one panel begin with: a row for each key.
template <typename E>
void short_terms(const RelativeTerms& relative, int64_t head, int64_t n, int64_t head_dim, const Left& q, const Left& k,
                 float* space, const TileScores& scores) {
  AmxTiles tiles;
  const TileTerms terms{table_of_head<E>(relative.query, head, head_dim),
                        table_of_head<E>(relative.key, head, head_dim), k, q};
  tile_terms<E>(tiles, terms, n, n, 0, space, scores);
}

FASTBERT_SIMD const float* bias_turned_of_head(const RelativeTerms& relative, int64_t head) {
  return relative.bias_turned + head * relative.bias_stride + relative.reach - 1;
}

// Relative terms of one (sequence, head), for tiles whose rows are queries.
struct QueryTerms {
  const RelativeTerms* relative;
  const int32_t* places;  // of the sequence's tokens; null where they follow each other
  int64_t first_key, keys;
  float* space;
  char* k_copy;
  float* key_ends;  // (2, keys): the products of keys with the ends of the table
  // Of a head.
  TileTerms tables;
  const float* bias;  // of distance 0
  bool has_key_ends;
};

// Of tiles with keys from first_key on.
template <typename E, typename T>
QueryTerms lay_out_terms(Carver& carver, const RelativeTerms& relative, const AttentionInputs<T>& in,
                         const AttentionTask& task, int64_t first_key, int64_t keys) {
  QueryTerms terms{};
  terms.relative = &relative;
  if (relative.has_holes(task.first_token, task.length)) terms.places = relative.places + task.first_token;
  terms.first_key = first_key, terms.keys = keys;
  const bool has_query = relative.query.columns != nullptr;
  terms.space = carver.take_floats(relative.has_tables() ? kTermSpace : 0);
  terms.k_copy = carver.take(has_query && !lies_ready<E, T>(in.head_dim) ? keys * whole_steps<E>(in.head_dim) * 4 : 0);
  terms.key_ends = carver.take_floats(has_query ? 2 * keys : 0);
  return terms;
}

template <typename E, typename T>
void begin_head(QueryTerms& terms, const AttentionInputs<T>& in, int64_t first_token, int64_t head) {
  const RelativeTerms& relative = *terms.relative;
  terms.tables.of_rows = table_of_head<E>(relative.key, head, in.head_dim);
  terms.tables.of_columns = table_of_head<E>(relative.query, head, in.head_dim);
  if (relative.query.columns != nullptr) {
    terms.tables.columns = left_rows<E>(in.k.at(first_token + terms.first_key, head), in.k.token_stride, terms.keys,
                                        in.head_dim, terms.k_copy);
  }
  terms.bias = relative.bias == nullptr ? nullptr : relative.bias + head * relative.bias_stride + relative.reach - 1;
  terms.has_key_ends = false;
}

// All distances of these columns are beyond an end of the tables: a number for each row, and one for each column.
FASTBERT_SIMD void fill_clamped(int64_t rows, int64_t begin, int64_t end, const float* of_rows, const float* of_columns,
                                const TileScores& scores) {
  for (int64_t r = 0; r < rows; ++r) {
    const Floats x = set1(of_rows == nullptr ? 0.0f : of_rows[r]);
    scores.by_panel(r, begin, end, [&](float* to, int64_t first, int64_t count) {
      for (int64_t c = 0; c < count; c += kWidth) {
        store(to + c, of_columns == nullptr ? x : add(x, load_columns(of_columns + first + c, count - c)));
      }
    });
  }
}

// What the scores of queries and keys of a sequence begin with; `scores` are those of the first key on.
template <typename E>
void begin_scores(AmxTiles& tiles, QueryTerms& terms, int64_t query, int64_t rows, const Left& q, int64_t key,
                  int64_t keys, const TileScores& scores) {
  constexpr int64_t kClampedColumns = 16;
  static_assert(kMostRows + kClampedColumns <= kTileDistances);
  const RelativeTerms& relative = *terms.relative;
  TileTerms tile = terms.tables;
  const int64_t stride = tile.columns.stride, first = key - terms.first_key;
  tile.rows = q, tile.columns.data += first * stride;
  if (terms.places != nullptr) {
    return gathered_terms<E>(tiles, tile, rows, keys, terms.places + query, terms.places + key, terms.space, scores);
  }
  // Columns before unclamped_begin are clamped to the left end for all rows,
  // those from unclamped_end on to the right one.
  const int64_t distance = key - query;
  const auto up = [&](int64_t c) {
    return std::clamp<int64_t>((c + kClampedColumns - 1) / kClampedColumns * kClampedColumns, 0, keys);
  };
  const int64_t unclamped_begin = up(std::max<int64_t>(0, relative.clamped_left - distance - kClampedColumns + 2));
  const int64_t unclamped_end =
      std::max(unclamped_begin, up(std::max<int64_t>(0, relative.clamped_right - distance + rows - 1)));
  if (unclamped_begin < unclamped_end) {
    tile.columns.data += unclamped_begin * stride;
    tile_terms<E>(tiles, tile, rows, unclamped_end - unclamped_begin, distance + unclamped_begin, terms.space,
                  {scores.scores, scores.panel_stride, scores.shift + unclamped_begin});
  }
  if (unclamped_begin == 0 && unclamped_end == keys) return;
  alignas(64) float row_ends[kMostRows];
  const bool has_rows = tile.of_rows.columns != nullptr, has_columns = tile.of_columns.columns != nullptr;
  if (has_columns && !terms.has_key_ends) {
    for (int64_t end = 0; end < 2; ++end) {
      end_products<E>(tiles, terms.keys, terms.tables.columns, tile.of_columns,
                      end == 0 ? -relative.clamped_left : -relative.clamped_right, terms.space,
                      terms.key_ends + end * terms.keys);
    }
    terms.has_key_ends = true;
  }
  const auto fill = [&](int64_t begin, int64_t end, bool is_right) {
    if (begin == end) return;
    if (has_rows) {
      end_products<E>(tiles, rows, q, tile.of_rows, is_right ? relative.clamped_right : relative.clamped_left,
                      terms.space, row_ends);
    }
    fill_clamped(rows, begin, end, has_rows ? row_ends : nullptr,
                 has_columns ? terms.key_ends + (is_right ? terms.keys : 0) + first : nullptr, scores);
  };
  fill(0, unclamped_begin, false);
  fill(unclamped_end, keys, true);
}

// Behind the products of queries and keys; whether the rows' `row_maxima` have been found, where they are wanted.
FASTBERT_SIMD bool end_scores(const QueryTerms& terms, int64_t query, int64_t rows, int64_t key, int64_t keys,
                              float softmax_scale, const TileScores& scores, float (*row_maxima)[kWidth]) {
  if (terms.bias == nullptr) return false;
  if (terms.places == nullptr) {
    add_bias(rows, keys, terms.bias + key - query, softmax_scale, scores, row_maxima);
    return row_maxima != nullptr;
  }
  add_bias_of_places(rows, keys, terms.places + query, terms.places + key, terms.bias, softmax_scale, scores);
  return false;
}
