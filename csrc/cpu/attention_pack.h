// What both directions of attention do around the tile: packing of either operand, products of any size, the way out.
// Included by attention_fwd_heads.h and attention_bwd_heads.h, once per ISA. T is how a tensor is stored, E what the
// products take.
#include "../include/gemm_tile.h"

template <typename E>
constexpr int64_t kPerStep = 4 / sizeof(E);

template <typename E>
FASTBERT_SIMD int64_t steps_of(int64_t n) {
  return (n + kPerStep<E> - 1) / kPerStep<E>;
}

template <typename E>
struct DotOf {
  using Dot = Float32Dot;
};
#if defined(FASTBERT_BF16)
template <>
struct DotOf<BFloat16> {
  using Dot = BFloat16Dot;
};
#endif

// Steps that operands have, zeros beyond the matrix: AMX takes whole groups.
template <typename E>
constexpr int64_t kStepGroup = kUsesAmx<typename DotOf<E>::Dot> ? kAmxSteps : 1;
template <typename E>
FASTBERT_SIMD int64_t whole_steps(int64_t n) {
  return (steps_of<E>(n) + kStepGroup<E> - 1) / kStepGroup<E> * kStepGroup<E>;
}

// Hands out parts of one allocation, each from a cache line's start. Without memory it only counts the bytes.
struct Carver {
  char* memory;
  int64_t size = 0;
  char* take(int64_t bytes) {
    char* part = memory == nullptr ? nullptr : memory + size;
    size += Scratch::rounded(bytes);
    if (memory != nullptr) forbid(memory + size, kFence);
    size += kFence;
    return part;
  }
  float* take_floats(int64_t count) { return reinterpret_cast<float*>(take(count * 4)); }
};

// kWidth steps of a row.
template <typename E, typename T>
FASTBERT_SIMD Ints load_steps(const T* row) {
  if constexpr (sizeof(E) == 2) {
    return load(reinterpret_cast<const int32_t*>(row));
  } else {
    return (Ints)load(row);
  }
}

// `rows` rows, after which the last one is repeated. Not inlined: among other code gcc 12 moves every row through the
// stack, and the square takes three times as long.
template <typename E, typename T>
__attribute__((noinline)) void pack_square(const T* x, int64_t stride, int64_t rows, int64_t count, char* to) {
  Ints block[kWidth];
#pragma GCC unroll 16
  for (int64_t r = 0; r < kWidth; ++r) block[r] = load_steps<E>(x + std::min(r, rows - 1) * stride);
  transpose(block);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kWidth; ++i) {
    if (i < count) store(reinterpret_cast<int32_t*>(to + i * kStepBytes), block[i]);
  }
}

// Rows turned by those of the tables that belong to the tokens from `position` of their sequence on, in fp32; backwards
// where `sign` is -1.
template <typename From, typename To>
void rotate_rows(const RotaryTables& tables, int64_t first_token, int64_t position, float sign, const From* x,
                 int64_t stride, int64_t rows, int64_t dims, To* out, int64_t out_stride) {
  const int64_t half = dims / 2, first = tables.by_token ? first_token + position : position;
  const int64_t step = tables.interleaved ? 2 : 1, other = tables.interleaved ? 1 : half;
  for (int64_t r = 0; r < rows; ++r, x += stride, out += out_stride) {
    const float *cos = tables.cos + (first + r) * tables.cos_stride,
                *sin = tables.sin + (first + r) * tables.sin_stride;
    int64_t i = 0;
    for (; !tables.interleaved && i + kWidth <= half; i += kWidth) {
      const Floats x1 = load(x + i), x2 = load(x + half + i), c = load(cos + i), s = load(sin + i);
      store(out + i, fma(x1, c, mul(x2, mul(s, set1(-sign)))));
      store(out + half + i, fma(x2, c, mul(x1, mul(s, set1(sign)))));
    }
    for (; i < half; ++i) {
      const float x1 = to_float(x[i * step]), x2 = to_float(x[i * step + other]), c = cos[i], s = sin[i] * sign;
      out[i * step] = from_float<To>(x1 * c - x2 * s);
      out[i * step + other] = from_float<To>(x2 * c + x1 * s);
    }
  }
}

template <typename T>
struct StridedRows {
  const T* data;
  int64_t stride;
};

// Asks for a head's rows of a short sequence: its parts of so many tokens' rows lie where the hardware does not guess.
// Not all tensors' at once, which would wait for the first-level cache's miss buffers. Not inlined, where it would take
// its callers' registers.
template <typename T>
__attribute__((noinline)) void fetch_rows(const HeadRows<T>& x, int64_t token, int64_t rows, int64_t head,
                                          int64_t head_dim) {
  const auto* row = reinterpret_cast<const char*>(x.at(token, head));
  const int64_t bytes = head_dim * static_cast<int64_t>(sizeof(T)),
                stride = x.token_stride * static_cast<int64_t>(sizeof(T));
  for (int64_t r = 0; r < rows; ++r, row += stride) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
  }
  __atomic_signal_fence(__ATOMIC_SEQ_CST);  // or gcc takes calls for ones that do nothing
}

// Rows of a head of q or k from `position` of a sequence on: where they lie, or rotated into `space`.
template <typename T>
StridedRows<T> rotated(const AttentionInputs<T>& in, const HeadRows<const T>& x, int64_t first_token, int64_t position,
                       int64_t rows, int64_t head, char* space) {
  const T* from = x.at(first_token + position, head);
  if (in.rotary.cos == nullptr) return {from, x.token_stride};
  T* to = reinterpret_cast<T*>(space);
  rotate_rows(in.rotary, first_token, position, 1.0f, from, x.token_stride, rows, in.head_dim, to, in.head_dim);
  return {to, in.head_dim};
}

// Rows become the columns of panels: (panels of kPanel rows, steps along `dims`, kPanel). Dims beyond the matrix are
// zeros up to whole steps; columns beyond it, up to a whole vector, are as the last one: where that is finite, what
// they make is, too.
template <typename E, typename T>
void pack_columns(const T* x, int64_t stride, int64_t rows, int64_t dims, char* out) {
  constexpr int64_t kBlock = kWidth * kPerStep<E>;  // dims of one square
  const int64_t steps = whole_steps<E>(dims);
  for (int64_t row = 0; row < rows; row += kWidth) {
    char* to = out + row / kPanel * steps * kStepBytes + row % kPanel * 4;
    const int64_t real = std::min(kWidth, rows - row);
    for (int64_t dim = 0; dim < dims; dim += kBlock, to += kWidth * kStepBytes) {
      const T* from = x + row * stride + dim;
      const int64_t width = std::min(kBlock, dims - dim);
      if (width == kBlock) {
        pack_square<E>(from, stride, real, kWidth, to);
        continue;
      }
      alignas(64) T padded[kWidth * kBlock] = {};
      for (int64_t r = 0; r < real; ++r) {
        std::memcpy(padded + r * kBlock, from + r * stride, static_cast<size_t>(width) * sizeof(T));
      }
      pack_square<E>(padded, kBlock, real, std::min(kWidth, whole_steps<E>(width)), to);
    }
  }
}

// One step of kWidth columns: of the one row, or of two rows of bfloat16.
template <typename E, typename T>
FASTBERT_SIMD void store_step(char* to, const T* even, [[maybe_unused]] const T* odd) {
#if defined(FASTBERT_BF16)
  if constexpr (sizeof(E) == 2) return store(reinterpret_cast<int32_t*>(to), pair_bf16(even, odd));
#endif
  store(reinterpret_cast<float*>(to), load(even));
}

template <typename E>
FASTBERT_SIMD void store_step(char* to, Floats even, [[maybe_unused]] Floats odd) {
#if defined(FASTBERT_BF16)
  if constexpr (sizeof(E) == 2) return store(reinterpret_cast<int32_t*>(to), pair_bf16(even, odd));
#endif
  store(reinterpret_cast<float*>(to), even);
}

// Rows become the steps of panels: (panels of kPanel dims, `panel_steps` steps along the rows, kPanel), zeros beyond
// the rows up to whole steps.
template <typename E, typename T>
void pack_rows(const T* x, int64_t stride, int64_t rows, int64_t dims, int64_t panel_steps, char* out) {
  alignas(64) static constexpr T kZeros[kPanel] = {};
  for (int64_t first = 0; first < dims; first += kPanel, out += panel_steps * kStepBytes) {
    const int64_t columns = std::min(kPanel, dims - first), whole = columns / kWidth * kWidth, part = columns - whole;
    for (int64_t row = 0; row < rows; row += kPerStep<E>) {
      const T* even = x + row * stride + first;
      const T* odd = row + 1 < rows ? even + stride : kZeros;
      char* to = out + row / kPerStep<E> * kStepBytes;
      for (int64_t i = 0; i < whole; i += kWidth) store_step<E>(to + i * 4, even + i, odd + i);
      if (part > 0) {
        T padded[2][kWidth] = {};
        std::memcpy(padded[0], even + whole, static_cast<size_t>(part) * sizeof(T));
        std::memcpy(padded[1], odd + whole, static_cast<size_t>(part) * sizeof(T));
        store_step<E>(to + whole * 4, padded[0], padded[1]);
      }
    }
    const int64_t filled = steps_of<E>(rows) * kStepBytes;
    std::memset(out + filled, 0, static_cast<size_t>(whole_steps<E>(rows) * kStepBytes - filled));
  }
}

// Rows as the tiles' left operand: where they lie if they are whole steps of E already, else copied, with zeros.
struct Left {
  const char* data;
  int64_t stride;  // bytes
};

template <typename E, typename T>
FASTBERT_SIMD bool lies_ready(int64_t dims) {
  return sizeof(E) == sizeof(T) && dims == whole_steps<E>(dims) * kPerStep<E>;
}

template <typename E, typename T>
Left left_rows(const T* x, int64_t stride, int64_t rows, int64_t dims, char* copy) {
  if (lies_ready<E, T>(dims)) return {reinterpret_cast<const char*>(x), stride * static_cast<int64_t>(sizeof(T))};
  const int64_t bytes = whole_steps<E>(dims) * 4;
  for (int64_t r = 0; r < rows; ++r) {
    E* to = reinterpret_cast<E*>(copy + r * bytes);
    for (int64_t i = 0; i < dims; ++i) to[i] = from_float<E>(to_float(x[r * stride + i]));
    for (int64_t i = dims; i < whole_steps<E>(dims) * kPerStep<E>; ++i) to[i] = from_float<E>(0.0f);
  }
  return {copy, bytes};
}

// One tile of exactly `rows` rows, which are at most kRows.
template <typename Dot, int kRows, int kVectors, int64_t kSumBytes>
FASTBERT_SIMD void exact_tile(int64_t rows, const char* a, int64_t row_stride, int64_t step_stride, const char* panel,
                              int64_t steps, bool accumulate, char* sums) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return exact_tile<Dot, kRows - 1, kVectors, kSumBytes>(rows, a, row_stride, step_stride, panel, steps, accumulate,
                                                             sums);
    }
  }
  tile<Dot, kRows, kVectors, 0, kSumBytes>(a, row_stride, step_stride, panel, steps, accumulate, sums);
}

// Narrow panels, which short sequences and small heads have, take tall tiles of nearly equal heights: enough sums at
// once to hide the latency of the products.
template <typename Dot, int kRows, int kVectors, int64_t kSumBytes>
void strip(int64_t rows, const char* a, int64_t row_stride, int64_t step_stride, const char* panel, int64_t steps,
           bool accumulate, char* sums) {
  for (int64_t tiles = (rows + kRows - 1) / kRows; tiles > 0; --tiles) {
    const int64_t height = (rows + tiles - 1) / tiles;
    exact_tile<Dot, kRows, kVectors, kSumBytes>(height, a, row_stride, step_stride, panel, steps, accumulate, sums);
    rows -= height;
    a += height * row_stride;
    sums += height * kSumBytes;
  }
}

template <typename Dot, int64_t kSumBytes>
FASTBERT_SIMD void product_chain(int64_t rows, const char* a, int64_t row_stride, int64_t step_stride,
                                 const char* panel, int64_t steps, int64_t columns, bool accumulate, char* sums) {
  if constexpr (kTileVectors == 4) {
    switch ((columns + kWidth - 1) / kWidth) {
      case 1:
        return strip<Dot, 16, 1, kSumBytes>(rows, a, row_stride, step_stride, panel, steps, accumulate, sums);
      case 2:
        return strip<Dot, 12, 2, kSumBytes>(rows, a, row_stride, step_stride, panel, steps, accumulate, sums);
      case 3:
        return strip<Dot, 8, 3, kSumBytes>(rows, a, row_stride, step_stride, panel, steps, accumulate, sums);
    }
  }
  for (int64_t row = 0; row < rows; row += kTileRows) {
    tile_rows<Dot, kSumBytes>(std::min<int64_t>(kTileRows, rows - row), a + row * row_stride, row_stride, step_stride,
                              panel, steps, columns, accumulate, sums + row * kSumBytes);
  }
}

// Steps whose products are added up in one go. The error of a longer chain of fp32 additions would show beside that of
// libraries, which sum by blocks; that of bfloat16 pairs stays far below their own rounding. The part of the panel that
// a chain takes also stays in the first-level cache while the rows pass by.
template <typename Dot>
constexpr int64_t kAttentionChain = std::is_same_v<Dot, Float32Dot> ? 32 : 128;

// sums (rows, kPanel) = or += `rows` rows of a times `columns` columns of one panel.
template <typename Dot, int64_t kSumBytes = kStepBytes>
void vector_product(int64_t rows, const char* a, int64_t row_stride, int64_t step_stride, const char* panel,
                    int64_t steps, int64_t columns, bool accumulate, char* sums) {
  for (int64_t step = 0; step < steps; step += kAttentionChain<Dot>) {
    product_chain<Dot, kSumBytes>(rows, a + step * step_stride, row_stride, step_stride, panel + step * kStepBytes,
                                  std::min(kAttentionChain<Dot>, steps - step), columns, accumulate || step > 0, sums);
  }
}

// The same for rows that lie whole, and for whole_steps.
template <typename Dot, int64_t kSumBytes = kStepBytes>
void product(AmxTiles& tiles, int64_t rows, const char* a, int64_t row_stride, const char* panel, int64_t steps,
             int64_t columns, bool accumulate, char* sums) {
  if constexpr (kUsesAmx<Dot>) {
    tiles.template product<Dot, kSumBytes>(rows, a, row_stride, panel, steps, columns, accumulate, sums);
  } else {
    vector_product<Dot, kSumBytes>(rows, a, row_stride, 4, panel, steps, columns, accumulate, sums);
  }
}

// Row r of out = factors[r * factor_stride] * row r of sums, for sums in panels of kPanel dims, `sum_rows` rows each.
template <typename T>
void write_rows(const char* sums, int64_t sum_rows, const float* factors, int64_t factor_stride, int64_t rows,
                int64_t dims, T* out, int64_t out_stride) {
  for (int64_t first = 0; first < dims; first += kPanel, sums += sum_rows * kStepBytes) {
    const int64_t columns = std::min(kPanel, dims - first), whole = columns / kWidth * kWidth;
    for (int64_t r = 0; r < rows; ++r) {
      const auto* from = reinterpret_cast<const float*>(sums + r * kStepBytes);
      T* to = out + r * out_stride + first;
      const Floats factor = set1(factors[r * factor_stride]);
      for (int64_t i = 0; i < whole; i += kWidth) store(to + i, mul(load(from + i), factor));
      if (whole < columns) {
        float part[kWidth];
        store(part, mul(load(from + whole), factor));
        for (int64_t i = whole; i < columns; ++i) to[i] = from_float<T>(part[i - whole]);
      }
    }
  }
}

struct Max {
  static FASTBERT_SIMD Floats combine(Floats a, Floats b) { return max(a, b); }
};
struct Sum {
  static FASTBERT_SIMD Floats combine(Floats a, Floats b) { return add(a, b); }
};

// Infinite in the lanes from number `begin` to number `end`, and -inf beside them: the smaller of this and a vector
// has -inf where a query does not see.
FASTBERT_SIMD Floats within(int64_t begin, int64_t end) {
  constexpr float kInf = __builtin_inff();
  alignas(64) static constexpr float kTable[48] = {
      -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf,
      kInf,  kInf,  kInf,  kInf,  kInf,  kInf,  kInf,  kInf,  kInf,  kInf,  kInf,  kInf,  kInf,  kInf,  kInf,  kInf,
      -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf};
  return min(load(kTable + 16 - std::clamp<int64_t>(begin, 0, kWidth)),
             load(kTable + 32 - std::clamp<int64_t>(end, 0, kWidth)));
}

// Lane r becomes the maximum or the sum of row r: each stage interleaves the rows two by two and combines their halves,
// in a third of the instructions that kWidth reductions of one vector take.
template <typename Op>
FASTBERT_SIMD Floats reduce_rows(const float (*lanes)[kWidth]) {
  Floats row[kWidth];
#pragma GCC unroll 16
  for (int64_t r = 0; r < kWidth; ++r) row[r] = load(lanes[r]);
#pragma GCC unroll 4
  for (int64_t half = kWidth / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int64_t r = 0; r < half; ++r) {
      const Ints a = (Ints)row[r], b = (Ints)row[r + half];
      row[r] = Op::combine((Floats)interleave_low(a, b), (Floats)interleave_high(a, b));
    }
  }
  return row[0];
}

// 0 in the lanes of keys that are there, of which `real` are left (any number above kWidth means all), and -inf beyond.
FASTBERT_SIMD Floats beyond(int64_t real) {
  constexpr float kInf = __builtin_inff();
  alignas(64) static constexpr float kTable[32] = {
      0,     0,     0,     0,     0,     0,     0,     0,     0,     0,     0,     0,     0,     0,     0,     0,
      -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf};
  return load(kTable + 16 - std::min(real, kWidth));
}

// exp(softmax_scale * (score - row_max)) of kWidth scores; `scale` has log2(e) in it. The difference comes
// first: it is exact near the maximum, where products would be rounded, and a probability that dominates is exactly 1.
template <typename E>
FASTBERT_SIMD Floats exp_score(const float* scores, Floats row_max, Floats scale, int64_t real) {
  const Floats x = mul(sub(load(scores), row_max), scale);
  return exp2<sizeof(E) == 4>(real >= kWidth ? x : add(x, beyond(real)));
}

// The same where a query sees the keys from number `begin` to number `end` of these.
template <typename E>
FASTBERT_SIMD Floats exp_seen(const float* scores, Floats row_max, Floats scale, int64_t begin, int64_t end) {
  const Floats x = mul(sub(load(scores), row_max), scale);
  return exp2<sizeof(E) == 4>(begin <= 0 && end >= kWidth ? x : min(within(begin, end), x));
}
