// AMX: eight tiles of 16 rows by 64 bytes, and products of them (Intel 64 and IA-32 Architectures Optimization
// Reference Manual, chapter 20). Included by gemm_tile.h. By hand instead of by intrinsics, whose tile numbers must be
// literals and which do not tell the compiler that they read memory.
//
// Where FASTBERT_AMX_EMULATION names a header, its functions stand in: tests run the kernels without such a CPU.

constexpr int64_t kAmxRows = 32, kAmxSteps = 16;

#if !defined(FASTBERT_AMX)
template <typename Dot>
constexpr bool kUsesAmx = false;
struct AmxTiles {
  // Never made: C++17 must know the name where it is called.
  template <typename Dot, int64_t kSumBytes = kStepBytes>
  void product(int64_t rows, const char* x, int64_t x_stride, const char* panel, int64_t steps, int64_t columns,
               bool accumulate, char* sums, int64_t lines = 0, const char* fetch = nullptr);
};
#else
template <typename Dot>
constexpr bool kUsesAmx = !std::is_same_v<Dot, Float32Dot>;

// ldtilecfg's operand: the shape of every tile.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

#if defined(FASTBERT_AMX_EMULATION)
#include FASTBERT_AMX_EMULATION
#else
FASTBERT_SIMD void amx_configure(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes)); }
FASTBERT_SIMD void amx_release() { __asm__ volatile("tilerelease"); }
template <int kTile>
FASTBERT_SIMD void amx_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
// `stride` bytes from row to row.
template <int kTile>
FASTBERT_SIMD void amx_load(const char* from, int64_t stride) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(stride) : "memory");
}
template <int kTile>
FASTBERT_SIMD void amx_store(char* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(to), "r"(stride) : "memory");
}
// C += A B: two bfloat16, or four unsigned bytes of A and four signed ones of B, in each of the steps' four bytes.
template <int kC, int kA, int kB>
FASTBERT_SIMD void amx_dot_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}
template <int kC, int kA, int kB>
FASTBERT_SIMD void amx_dot_bytes() {
  __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}
#endif

template <typename Dot, int kC, int kA, int kB>
FASTBERT_SIMD void amx_dot() {
  if constexpr (std::is_same_v<Dot, Int8Dot>) {
    amx_dot_bytes<kC, kA, kB>();
  } else {
    amx_dot_bf16<kC, kA, kB>();
  }
}

// Tiles 0 to 3 are the sums of 32 rows by 32 columns, 4 and 5 the rows, 6 and 7 the columns. Each group of steps also
// asks for `lines` cache lines from `fetch` on.
template <typename Dot, bool kBelow, int64_t kSumBytes>
FASTBERT_SIMD void amx_square(const char* x, int64_t x_stride, const char* panel, int64_t steps, bool accumulate,
                              char* sums, const char* fetch, int64_t lines) {
  char* below = sums + 16 * kSumBytes;
  if (accumulate) {
    amx_load<0>(sums, kSumBytes);
    amx_load<1>(sums + 64, kSumBytes);
    if constexpr (kBelow) {
      amx_load<2>(below, kSumBytes);
      amx_load<3>(below + 64, kSumBytes);
    }
  } else {
    amx_zero<0>();
    amx_zero<1>();
    if constexpr (kBelow) {
      amx_zero<2>();
      amx_zero<3>();
    }
  }
  for (int64_t step = 0; step < steps; step += kAmxSteps) {
    for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(fetch + line * 64, 0, 2);
    fetch += lines * 64;
    amx_load<6>(panel + step * kStepBytes, kStepBytes);
    amx_load<7>(panel + step * kStepBytes + 64, kStepBytes);
    amx_load<4>(x + step * 4, x_stride);
    amx_dot<Dot, 0, 4, 6>();
    amx_dot<Dot, 1, 4, 7>();
    if constexpr (kBelow) {
      amx_load<5>(x + 16 * x_stride + step * 4, x_stride);
      amx_dot<Dot, 2, 5, 6>();
      amx_dot<Dot, 3, 5, 7>();
    }
  }
  amx_store<0>(sums, kSumBytes);
  amx_store<1>(sums + 64, kSumBytes);
  if constexpr (kBelow) {
    amx_store<2>(below, kSumBytes);
    amx_store<3>(below + 64, kSumBytes);
  }
}

// `columns` of a panel become rows of `steps` steps, `stride` bytes apart, both rounded up to kWidth: AMX reads rows,
// and what is summed over may lie the other way round.
inline void amx_transpose(const char* panel, int64_t steps, int64_t columns, int64_t stride, char* rows) {
  Ints square[kWidth];
  for (int64_t step = 0; step < steps; step += kWidth) {
    for (int64_t c = 0; c < columns; c += kWidth) {
      const char* from = panel + step * kStepBytes + c * 4;
      for (int64_t i = 0; i < kWidth; ++i) square[i] = load(reinterpret_cast<const int32_t*>(from + i * kStepBytes));
      transpose(square);
      char* to = rows + c * stride + step * 4;
      for (int64_t i = 0; i < kWidth; ++i) store(reinterpret_cast<int32_t*>(to + i * stride), square[i]);
    }
  }
}

// A thread's tiles while it is at one product. Shaped anew only when the number of rows changes.
class AmxTiles {
 public:
  AmxTiles() = default;
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  ~AmxTiles() {
    if (rows_ > 0) amx_release();
  }

  // sums (rows, kPanel) = or += rows of x times `columns` (rounded up to 32) of the panel, from whole groups of
  // kAmxSteps steps. With `lines` cache lines fetched a group of steps, from `fetch` on.
  template <typename Dot, int64_t kSumBytes = kStepBytes>
  void product(int64_t rows, const char* x, int64_t x_stride, const char* panel, int64_t steps, int64_t columns,
               bool accumulate, char* sums, int64_t lines = 0, const char* fetch = nullptr) {
    for (int64_t row = 0; row < rows; row += kAmxRows) {
      const int64_t height = std::min(kAmxRows, rows - row);
      const char* from = x + row * x_stride;
      shape(height);
      for (int64_t column = 0; column < columns; column += 32) {
        char* to = sums + row * kSumBytes + column * 4;
        if (height > 16) {
          amx_square<Dot, true, kSumBytes>(from, x_stride, panel + column * 4, steps, accumulate, to, fetch, lines);
        } else {
          amx_square<Dot, false, kSumBytes>(from, x_stride, panel + column * 4, steps, accumulate, to, fetch, lines);
        }
        fetch += steps / kAmxSteps * lines * 64;
      }
    }
  }

 private:
  void shape(int64_t rows) {
    if (rows == rows_) return;
    rows_ = rows;
    TileShapes shapes;
    const auto upper = static_cast<uint8_t>(rows > 16 ? 16 : rows),
               lower = static_cast<uint8_t>(rows > 16 ? rows - 16 : 0);
    const uint8_t heights[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int tile = 0; tile < 8; ++tile) {
      if (heights[tile] == 0) continue;  // left out: no rows and no bytes
      shapes.rows[tile] = heights[tile];
      shapes.row_bytes[tile] = 64;
    }
    amx_configure(shapes);
  }

  int64_t rows_ = 0;
};
#endif
