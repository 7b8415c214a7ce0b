// The innermost product: a tile of up to 6 rows and 64 columns, summed in registers. Included by foreach_isa.h's
// bodies.
//
// The right-hand operand is packed in panels of kPanel columns. A panel runs along the summed dimension in steps of
// four bytes a column: one float, two bfloat16 or four int8, so that one broadcast of four bytes of a row meets kPanel
// columns. The left-hand operand is read where it lies, row by row, four bytes a step.
//
// On Zen 5 a tile runs at 98 % of what the vector units can do in every format (2 dot products a cycle and core); tiles
// of 8 x 48, 12 x 32 and 14 x 32 measured the same or less.

constexpr int kTileRows = 6;
// The most rows that tile_rows takes. Seven fit into AVX-512's 32 registers, 28 sums beside 4 of the panel: for
// products of just so many, which take 0.88 of the time of tiles of 4 and 3. More rows in tiles of 7 measured 0.99
// to 1.01.
constexpr int kMostTileRows = kWidth == 16 ? 7 : kTileRows;
constexpr int64_t kStepBytes = kPanel * 4;
// A tile that is narrower than a panel asks for its own lines so far ahead: they are a panel's width apart, which the
// hardware does not fetch in time. AVX2 (Zen 3), 174 rows of 768, with the fetches of gemm_body.h: 1.11 times as fast;
// 4, 8 and 32 steps 1.09. A copy whose lines lie side by side was 1.08.
constexpr int64_t kStepsAhead = 16;

struct Float32Dot {
  using Sum = Floats;
  static FASTBERT_SIMD Sum zero() { return set1(0.0f); }
  static FASTBERT_SIMD Sum add_product(Sum c, const char* a, Ints b) {
    float x;
    __builtin_memcpy(&x, a, 4);
    return fma(set1(x), (Floats)b, c);
  }
};

#if defined(FASTBERT_BF16)
struct BFloat16Dot {
  using Sum = Floats;
  static FASTBERT_SIMD Sum zero() { return set1(0.0f); }
  static FASTBERT_SIMD Sum add_product(Sum c, const char* a, Ints b) { return dot_bf16(c, a, b); }
};
#endif

struct Int8Dot {
  using Sum = Ints;
  static FASTBERT_SIMD Sum zero() { return set1(0); }
  template <typename T>  // a vector, or where it lies
  static FASTBERT_SIMD Sum add_product(Sum c, const char* a, T b) {
    return dot_bytes(c, a, b);
  }
  template <typename T>
  static FASTBERT_SIMD Sum add_pairs(Sum c, T a, T b) {
    return dot_of_pairs(c, a, b);
  }
};

// Whether int8 panels are split, and read from memory by the multiplication itself: a third register is needed.
template <typename Dot>
constexpr bool kIsSplit = kSplitsBytes && std::is_same_v<Dot, Int8Dot>;

// sums (kRows, kPanel), four bytes each: rows of `a` times kVectors vectors of the panel, from `steps` steps; added to
// what is there if `accumulate`. Strides are in bytes: a matrix as it lies has steps 4 apart, a packed panel serves as
// its own transpose with rows 4 and steps kStepBytes apart. Each step also asks for kFetch cache lines from `fetch` on:
// what is needed next comes into the second-level cache while the vector units are busy. Rows of `sums` are kSumBytes
// apart, steps of the panel kPanelBytes.
template <typename Dot, int kRows, int kVectors, int kFetch = 0, int64_t kSumBytes = kStepBytes,
          int64_t kPanelBytes = kStepBytes>
FASTBERT_SIMD void tile(const char* a, int64_t row_stride, int64_t step_stride, const char* panel, int64_t steps,
                        bool accumulate, char* sums, const char* fetch = nullptr) {
  using Sum = typename Dot::Sum;
  Sum sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = Dot::zero();
  }
  for (int64_t step = 0; step < steps; ++step) {
    for (int line = 0; line < kFetch; ++line) __builtin_prefetch(fetch + (step * kFetch + line) * 64, 0, 2);
    if constexpr (kVectors * kWidth * 4 < kPanelBytes) {
      __builtin_prefetch(panel + (step + kStepsAhead) * kPanelBytes, 0, 3);
    }
    const char* of_step = panel + step * kPanelBytes;
    Ints b[kVectors];
    for (int v = 0; v < kVectors; ++v) b[v] = load(reinterpret_cast<const int32_t*>(of_step) + v * kWidth);
    for (int r = 0; r < kRows; ++r) {
      const char* x = a + r * row_stride + step * step_stride;
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (kIsSplit<Dot>) {
          sum[r][v] = Dot::add_product(sum[r][v], x, of_step + v * kWidth * 4);
        } else {
          sum[r][v] = Dot::add_product(sum[r][v], x, b[v]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      auto* to = reinterpret_cast<int32_t*>(sums + r * kSumBytes) + v * kWidth;
      if (accumulate) sum[r][v] = add((Sum)load(to), sum[r][v]);
      store(to, (Ints)sum[r][v]);
    }
  }
}

// As tile, for `columns` (rounded up to what a tile has) of the panel, and with `lines` (0, 1, 2 or 4) cache lines
// fetched a step where a tile has the panel's width.
template <typename Dot, int kRows, int64_t kSumBytes = kStepBytes, int64_t kPanelBytes = kStepBytes>
void tile_row(const char* a, int64_t row_stride, int64_t step_stride, const char* panel, int64_t steps, int64_t columns,
              bool accumulate, char* sums, int64_t lines, const char* fetch) {
  constexpr int64_t kColumns = kTileVectors * kWidth;
  if constexpr (kColumns == kPanel && kRows >= 3) {
    if (lines == 4) {
      return tile<Dot, kRows, kTileVectors, 4, kSumBytes>(a, row_stride, step_stride, panel, steps, accumulate, sums,
                                                          fetch);
    }
    if (lines == 1) {
      return tile<Dot, kRows, kTileVectors, 1, kSumBytes>(a, row_stride, step_stride, panel, steps, accumulate, sums,
                                                          fetch);
    }
    if (lines == 2) {
      return tile<Dot, kRows, kTileVectors, 2, kSumBytes>(a, row_stride, step_stride, panel, steps, accumulate, sums,
                                                          fetch);
    }
  }
  for (int64_t c = 0; c < columns; c += kColumns) {
    tile<Dot, kRows, kTileVectors, 0, kSumBytes, kPanelBytes>(a, row_stride, step_stride, panel + c * 4, steps,
                                                              accumulate, sums + c * 4);
  }
}

template <typename Dot, int64_t kSumBytes = kStepBytes, int64_t kPanelBytes = kStepBytes>
FASTBERT_SIMD void tile_rows(int64_t rows, const char* a, int64_t row_stride, int64_t step_stride, const char* panel,
                             int64_t steps, int64_t columns, bool accumulate, char* sums, int64_t lines = 0,
                             const char* fetch = nullptr) {
  if constexpr (kMostTileRows == 7) {
    if (rows == 7) {
      return tile_row<Dot, 7, kSumBytes, kPanelBytes>(a, row_stride, step_stride, panel, steps, columns, accumulate,
                                                      sums, lines, fetch);
    }
  }
  switch (rows) {
    case 1:
      return tile_row<Dot, 1, kSumBytes, kPanelBytes>(a, row_stride, step_stride, panel, steps, columns, accumulate,
                                                      sums, lines, fetch);
    case 2:
      return tile_row<Dot, 2, kSumBytes, kPanelBytes>(a, row_stride, step_stride, panel, steps, columns, accumulate,
                                                      sums, lines, fetch);
    case 3:
      return tile_row<Dot, 3, kSumBytes, kPanelBytes>(a, row_stride, step_stride, panel, steps, columns, accumulate,
                                                      sums, lines, fetch);
    case 4:
      return tile_row<Dot, 4, kSumBytes, kPanelBytes>(a, row_stride, step_stride, panel, steps, columns, accumulate,
                                                      sums, lines, fetch);
    case 5:
      return tile_row<Dot, 5, kSumBytes, kPanelBytes>(a, row_stride, step_stride, panel, steps, columns, accumulate,
                                                      sums, lines, fetch);
    default:
      return tile_row<Dot, 6, kSumBytes, kPanelBytes>(a, row_stride, step_stride, panel, steps, columns, accumulate,
                                                      sums, lines, fetch);
  }
}

#include "amx.h"
