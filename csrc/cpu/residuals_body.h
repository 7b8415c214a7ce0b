// What int8 panels were split of (gemm.h), for one ISA; included by gemm_body.h and maxsim_body.h.
#if !defined(FASTBERT_USES_VNNI)
#error "without it a processor with VNNI runs the copy for split panels, and its panels are not split"
#endif

// Rows of bytes (rows, steps of four bytes) as (steps, rows), so that a vector has a step of several rows.
struct StepsOfRows {
  const int32_t* data;
  int64_t stride;  // rows, rounded up to whole vectors

  static StepsOfRows of(const Rows& x, int64_t rows, int64_t steps, Scratch& memory) {
    const int64_t stride = (rows + kWidth - 1) / kWidth * kWidth;
    auto* out = reinterpret_cast<int32_t*>(memory.get(stride * steps * 4));
    for (int64_t r = 0; r < rows; r += kWidth) {
      const int64_t count = std::min(kWidth, rows - r);
      for (int64_t s = 0; s < steps; s += kWidth) {
        Ints square[kWidth];
        const int64_t columns = std::min(kWidth, steps - s);
        for (int64_t i = 0; i < kWidth; ++i) {
          square[i] = set1(0);
          if (i < count) std::memcpy(&square[i], x.data + (r + i) * x.stride + s * 4, static_cast<size_t>(columns) * 4);
        }
        transpose(square);
        for (int64_t i = 0; i < columns; ++i) store(out + (s + i) * stride + r, square[i]);
      }
    }
    return {out, stride};
  }
};

// sums (rows, kWidth) = kVectors vectors of rows times the residuals of kWidth columns from `begin` on.
template <typename Dot, int kVectors>
FASTBERT_SIMD void residual_columns(const StepsOfRows& x, int64_t row, int64_t rows, const int32_t* begin,
                                    const Residual* values, char* sums) {
  Ints squares[kVectors][kWidth];
  for (int64_t c = 0; c < kWidth; ++c) {
    Ints sum[kVectors];
    for (int v = 0; v < kVectors; ++v) sum[v] = set1(0);
    for (int32_t i = begin[c]; i < begin[c + 1]; ++i) {
      int32_t four;
      std::memcpy(&four, values[i].bytes, 4);
      const int32_t* steps = x.data + values[i].step * x.stride + row;
      for (int v = 0; v < kVectors; ++v) sum[v] = Dot::add_pairs(sum[v], load(steps + v * kWidth), set1(four));
    }
    for (int v = 0; v < kVectors; ++v) squares[v][c] = sum[v];
  }
  for (int v = 0; v < kVectors; ++v) {
    transpose(squares[v]);
    for (int64_t r = 0; r < std::min(kWidth, rows - row - v * kWidth); ++r) {
      store(reinterpret_cast<int32_t*>(sums + (row + v * kWidth + r) * kStepBytes), squares[v][r]);
    }
  }
}

// Whether the `columns` of a panel, the first of the weight's columns being `column`, have any. Then these columns of
// sums (rows, kPanel) = x times them, to which the panel's own products are to be added.
template <typename Dot>
bool residual_sums(const StepsOfRows& x, int64_t rows, const Residuals& residuals, int64_t column, int64_t columns,
                   char* sums) {
  const int32_t* begin = residuals.begin + column;
  if (begin[0] == begin[columns]) return false;
  constexpr int64_t kTile = kTileVectors * kWidth;  // whose columns are added to all together
  for (int64_t c = 0; c < (columns + kTile - 1) / kTile * kTile; c += kWidth) {
    int64_t row = 0;
    const auto pass = [&](auto vectors) {
      for (; row + vectors() * kWidth <= x.stride; row += vectors() * kWidth) {
        residual_columns<Dot, vectors()>(x, row, rows, begin + c, residuals.values, sums + c * 4);
      }
    };
    pass(std::integral_constant<int, 12>{});
    pass(std::integral_constant<int, 4>{});
    pass(std::integral_constant<int, 2>{});
    pass(std::integral_constant<int, 1>{});
  }
  return true;
}
