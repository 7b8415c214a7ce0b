// GEMM for one ISA; included by gemm.cpp through foreach_isa.h.
#include "../include/gemm_tile.h"
#include "convert_body.h"
#include "pack_body.h"

// What goes with each output column, padded to whole panels.
struct Channels {
  const float* bias;
  const float* scale;  // int8
};

// What a tile's sums still need in inference: scales, bias, activation, and the way out. Whole panels, without a branch
// inside: beside the 200 steps of an int8 tile every instruction here shows.
template <typename T, bool kInt8, Activation kActivation>
void finish_whole_tile(const GemmTarget& target, const Channels& channels, const float* row_scale, int64_t row,
                       int64_t rows, int64_t column, const char* sums) {
  constexpr int64_t kGroup = 4;  // vectors whose bias and scale stay in registers for all rows
  for (int64_t first = column; first < column + kPanel; first += kGroup * kWidth) {
    Floats bias[kGroup], scale[kGroup];
    Ints offset[kGroup];
    for (int64_t v = 0; v < kGroup; ++v) {
      bias[v] = load(channels.bias + first + v * kWidth);
      if constexpr (kInt8) {
        scale[v] = load(channels.scale + first + v * kWidth);
        offset[v] = load(target.weight.channel_offset + first + v * kWidth);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      const char* sum = sums + r * kStepBytes + (first - column) * 4;
      T* out = static_cast<T*>(target.out) + (row + r) * target.out_stride + first;
      for (int64_t v = 0; v < kGroup; ++v) {
        Floats x;
        if constexpr (kInt8) {
          const Ints exact = sub(load(reinterpret_cast<const int32_t*>(sum) + v * kWidth), offset[v]);
          x = fma(mul(to_floats(exact), set1(row_scale[r])), scale[v], bias[v]);
        } else {
          x = add(load(reinterpret_cast<const float*>(sum) + v * kWidth), bias[v]);
        }
        if constexpr (kActivation != Activation::kNone) x = activate<sizeof(T) == 4>(kActivation, x);
        store(out + v * kWidth, x);
      }
    }
  }
}

// The same for whatever is rarer: a panel's rest, other activations, what backward keeps and makes.
template <typename T>
void finish_any_tile(const GemmTarget& target, const Channels& channels, const float* row_scale, int64_t row,
                     int64_t rows, int64_t column, const char* sums) {
  const int64_t columns = std::min(kPanel, target.weight.out_features - column);
  const bool is_int8 = target.weight.format == DType::kInt8;
  const Activation activation = target.activation;
  for (int64_t c = 0; c < columns; c += kWidth) {
    const Floats bias = load(channels.bias + column + c);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = (row + r) * target.out_stride + column + c;
      Floats x;
      if (is_int8) {
        const Ints exact = sub(load(reinterpret_cast<const int32_t*>(sums + r * kStepBytes) + c),
                               load(target.weight.channel_offset + column + c));
        x = fma(to_floats(exact), mul(load(channels.scale + column + c), set1(row_scale[r])), bias);
      } else {
        x = add(load(reinterpret_cast<const float*>(sums + r * kStepBytes) + c), bias);
      }
      if (target.slope_of != nullptr) {
        const Floats before = load_columns(static_cast<const T*>(target.slope_of) + at, columns - c);
        const Floats after = activate<sizeof(T) == 4>(activation, before);
        x = mul(x, activation_slope<sizeof(T) == 4>(activation, before));
        store_columns(static_cast<T*>(target.activated) + at, after, columns - c);
      } else if (activation != Activation::kNone) {
        if (target.pre != nullptr) store_columns(static_cast<T*>(target.pre) + at, x, columns - c);
        x = activate<sizeof(T) == 4>(activation, x);
      }
      store_columns(static_cast<T*>(target.out) + at, x, columns - c);
    }
  }
}

template <typename T, bool kInt8>
FASTBERT_SIMD void finish_tile(const GemmTarget& target, const Channels& channels, const float* row_scale, int64_t row,
                               int64_t rows, int64_t column, const char* sums) {
  if (target.weight.out_features - column >= kPanel && target.pre == nullptr && target.slope_of == nullptr) {
    switch (target.activation) {
      case Activation::kNone:
        return finish_whole_tile<T, kInt8, Activation::kNone>(target, channels, row_scale, row, rows, column, sums);
      case Activation::kGelu:
        return finish_whole_tile<T, kInt8, Activation::kGelu>(target, channels, row_scale, row, rows, column, sums);
      case Activation::kGeluTanh:
        return finish_whole_tile<T, kInt8, Activation::kGeluTanh>(target, channels, row_scale, row, rows, column, sums);
      default:
        break;
    }
  }
  finish_any_tile<T>(target, channels, row_scale, row, rows, column, sums);
}

// Steps that are summed in one go: a chain of 3072 fp32 additions would lose two more bits than the blocked sums of
// other libraries. The sums of bf16 pairs are half as many, and what they lose is far below the operands' own rounding;
// int8 sums are exact.
template <typename Dot>
constexpr int64_t kGemmChain = std::is_same_v<Dot, Float32Dot> ? 256 : INT64_MAX;

// Steps of a panel that all rows of a block go through before the next ones: 96 KB of panel, and as much that is on its
// way, leave room in the second-level cache for the rows. Few rows are bound by the panels' way from memory: theirs, 24
// KB, stay in the first.
constexpr int64_t kBlockSteps = 384, kFewRowsSteps = 96;
// AMX takes a panel faster than the second-level cache gives it: the rows pass by a stretch that stays in the first.
constexpr int64_t kAmxBlockSteps = 128;
constexpr int64_t kFewRows = 4 * kTileRows;

// A part of one product: steps [0, steps) of a panel and of the rows at `x`.
struct Part {
  const char* x;
  int64_t x_stride;
  const char* panel;
  int64_t steps;
};

// The cache lines a step that tile `index` of a block of rows fetches of what follows the part in memory, mostly the
// next part, after the `before` lines a step of the tiles before it: four in all, spread over the tiles, since fetches
// that come too fast wait for the first-level cache's miss buffers. A single tile leaves it to the hardware.
struct Fetch {
  int64_t lines, before;

  static Fetch of(int64_t index, int64_t tiles, int64_t lines = 4) {
    if (tiles <= 1) return {0, 0};
    const int64_t before = (index * lines + tiles / 2) / tiles;
    return {((index + 1) * lines + tiles / 2) / tiles - before, before};
  }
};

// One part for one tile, added to `sums` if `accumulate`.
template <typename Dot>
FASTBERT_SIMD void tile_part(const Part& part, int64_t row, int64_t rows, int64_t block_rows, int64_t columns,
                             bool accumulate, char* sums) {
  const char* x = part.x + row * part.x_stride;
  const Fetch fetch = Fetch::of(row / kTileRows, (block_rows + 2) / kTileRows);
  for (int64_t step = 0; step == 0 || step < part.steps; step += kGemmChain<Dot>) {
    const int64_t count = std::min(part.steps - step, kGemmChain<Dot>);
    const char* panel = part.panel + step * kStepBytes;
    const char* next = part.panel + part.steps * kStepBytes + (fetch.before * part.steps + step * fetch.lines) * 64;
    tile_rows<Dot>(rows, x + step * 4, part.x_stride, 4, panel, count, columns, accumulate || step > 0, sums,
                   fetch.lines, next);
  }
}

// The same for up to kAmxRows rows; steps that are no whole group go the ordinary way.
template <typename Dot>
void amx_part(AmxTiles& tiles, const Part& part, int64_t row, int64_t rows, int64_t block_rows, int64_t columns,
              bool accumulate, char* sums) {
  const int64_t whole = part.steps / kAmxSteps * kAmxSteps, groups = whole / kAmxSteps;
  if (whole > 0) {
    // Two squares of 32 columns pass each group of steps: half of its lines for each.
    const Fetch fetch = Fetch::of(row / kAmxRows, (block_rows + kAmxRows - 1) / kAmxRows, 4 * kAmxSteps / 2);
    tiles.product<Dot>(rows, part.x + row * part.x_stride, part.x_stride, part.panel, whole, columns, accumulate, sums,
                       fetch.lines, part.panel + part.steps * kStepBytes + fetch.before * 2 * groups * 64);
  }
  if (whole == part.steps) return;
  const Part rest{part.x + whole * 4, part.x_stride, part.panel + whole * kStepBytes, part.steps - whole};
  for (int64_t r = 0; r < rows; r += kTileRows) {
    tile_part<Dot>(rest, row + r, std::min<int64_t>(kTileRows, rows - r), block_rows, columns, accumulate || whole > 0,
                   sums + r * kStepBytes);
  }
}

template <typename Dot>
void gemm_panels(const GemmArgs& args, const GemmTarget& target, const Rows& x, const Rows* addends, int64_t row_begin,
                 int64_t row_end, int64_t begin, int64_t end, const Channels& channels, Scratch& scratch) {
  constexpr bool kInt8 = std::is_same_v<Dot, Int8Dot>;
  const int64_t block_rows = row_end - row_begin;
  constexpr int64_t kManyRowsSteps = kUsesAmx<Dot> ? kAmxBlockSteps : kBlockSteps;
  const int64_t block_steps = block_rows > kFewRows ? kManyRowsSteps : kFewRowsSteps;
  constexpr int64_t kRows = kUsesAmx<Dot> ? kAmxRows : kTileRows;
  char* sums = scratch.get(block_rows * kStepBytes);
  [[maybe_unused]] AmxTiles tiles;
  for (int64_t p = begin; p < end; ++p) {
    const int64_t columns = std::min(kPanel, target.weight.out_features - p * kPanel);
    for (int64_t product = 0; product <= target.num_addends; ++product) {
      const PackedWeight& weight = product == 0 ? target.weight : target.addends[product - 1].weight;
      const Rows& rows = product == 0 ? x : addends[product - 1];
      const int64_t bytes = panel_bytes(weight.format, weight.in_features), steps = bytes / kStepBytes;
      for (int64_t step = 0; step == 0 || step < steps; step += block_steps) {
        const Part part{rows.data + step * 4, rows.stride, weight.packed + p * bytes + step * kStepBytes,
                        std::min(block_steps, steps - step)};
        const bool first = product == 0 && step == 0;
        const bool last = product == target.num_addends && step + block_steps >= steps;
        for (int64_t row = 0; row < block_rows; row += kRows) {
          const int64_t count = std::min<int64_t>(kRows, block_rows - row);
          char* tile_sums = sums + row * kStepBytes;
          if constexpr (kUsesAmx<Dot>) {
            amx_part<Dot>(tiles, part, row, count, block_rows, columns, !first, tile_sums);
          } else {
            tile_part<Dot>(part, row, count, block_rows, columns, !first, tile_sums);
          }
          if (!last) continue;
          const float* row_scale = x.scale == nullptr ? nullptr : x.scale + row;
          if (args.out_dtype == DType::kFloat32) {
            finish_tile<float, kInt8>(target, channels, row_scale, row_begin + row, count, p * kPanel, tile_sums);
          } else {
            finish_tile<BFloat16, kInt8>(target, channels, row_scale, row_begin + row, count, p * kPanel, tile_sums);
          }
        }
      }
    }
  }
}

void gemm(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  static thread_local Prepared prepared;
  static thread_local Scratch sums;
  static thread_local std::deque<Prepared> prepared_addends;
  static thread_local std::vector<float> channels;
  Rows x{nullptr, 0, nullptr};
  const PackedWeight* last = nullptr;  // the weight that x was prepared for
  int64_t first = 0;
  for (int64_t t = 0; t < args.num_targets; ++t) {
    const GemmTarget& target = args.targets[t];
    const PackedWeight& weight = target.weight;
    const int64_t panels = num_panels(weight.out_features);
    const int64_t begin = std::max<int64_t>(panel_begin - first, 0), end = std::min(panel_end - first, panels);
    first += panels;
    if (begin >= end) continue;
    if (last == nullptr || last->format != weight.format || last->input_scale != weight.input_scale) {
      x = prepared.prepare(args.x, row_begin, row_end - row_begin, weight);
      last = &weight;
    }
    std::vector<Rows> addends;
    while (static_cast<int64_t>(prepared_addends.size()) < target.num_addends) prepared_addends.emplace_back();
    for (int64_t i = 0; i < target.num_addends; ++i) {
      const GemmAddend& addend = target.addends[i];
      addends.push_back(prepared_addends[i].prepare(addend.x, row_begin, row_end - row_begin, addend.weight));
    }
    const int64_t first_column = begin * kPanel, columns = (end - begin) * kPanel;
    const int64_t count = std::min(columns, weight.out_features - first_column);
    channels.assign(static_cast<size_t>(2 * columns), 0.0f);
    float *bias = channels.data(), *scale = bias + columns;
    if (target.bias != nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = first_column + i;
        bias[i] = target.bias_dtype == DType::kFloat32 ? static_cast<const float*>(target.bias)[at]
                                                       : to_float(static_cast<const BFloat16*>(target.bias)[at]);
      }
    }
    if (weight.format == DType::kInt8) std::copy_n(weight.channel_scale + first_column, count, scale);
    const Channels of{bias - first_column, scale - first_column};
    switch (weight.format) {
      case DType::kFloat32:
        gemm_panels<Float32Dot>(args, target, x, addends.data(), row_begin, row_end, begin, end, of, sums);
        break;
      case DType::kBFloat16:
#if defined(FASTBERT_BF16)
        gemm_panels<BFloat16Dot>(args, target, x, addends.data(), row_begin, row_end, begin, end, of, sums);
#endif
        break;
      case DType::kInt8:
        gemm_panels<Int8Dot>(args, target, x, addends.data(), row_begin, row_end, begin, end, of, sums);
        break;
    }
  }
}

// Sums (rows, kPanel) of one block, on their way out.
FASTBERT_SIMD void store_block(const GemmTransposedArgs& args, int64_t a_panel, int64_t b_panel, int64_t rows,
                               int64_t columns, const char* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = (a_panel * kPanel + r) * args.b_features + b_panel * kPanel;
    for (int64_t c = 0; c < columns; c += kWidth) {
      const Floats x = load(reinterpret_cast<const float*>(sums + r * kStepBytes) + c);
      if (args.out_dtype == DType::kFloat32) {
        store_columns(static_cast<float*>(args.out) + at + c, x, columns - c);
      } else {
        store_columns(static_cast<BFloat16*>(args.out) + at + c, x, columns - c);
      }
    }
  }
}

// `rows` rows of a^T times b's panel, steps [first, steps): a's panel is read as its own transpose. A stretch of tokens
// at a time, so that b's stays in the cache for all rows.
template <typename Dot>
FASTBERT_SIMD void transposed_block(const char* a, const char* b, int64_t first, int64_t steps, int64_t rows,
                                    int64_t columns, char* sums) {
  for (int64_t step = first; step == 0 || step < steps; step += 256) {
    const int64_t count = std::min<int64_t>(steps - step, 256);
    for (int64_t r = 0; r < rows; r += kTileRows) {
      tile_rows<Dot>(std::min<int64_t>(kTileRows, rows - r), a + step * kStepBytes + r * 4, 4, kStepBytes,
                     b + step * kStepBytes, count, columns, step > 0, sums + r * kStepBytes);
    }
  }
}

template <typename Dot>
void gemm_transposed_blocks(const GemmTransposedArgs& args, int64_t begin, int64_t end) {
  const int64_t bytes = panel_bytes(args.format, args.tokens), steps = bytes / kStepBytes;
  const int64_t b_panels = num_panels(args.b_features);
  alignas(64) char sums[kPanel * kStepBytes];
  for (int64_t block = begin; block < end; ++block) {
    const int64_t a_panel = block / b_panels, b_panel = block % b_panels;
    const int64_t rows = std::min(kPanel, args.a_features - a_panel * kPanel);
    const int64_t columns = std::min(kPanel, args.b_features - b_panel * kPanel);
    transposed_block<Dot>(args.a + a_panel * bytes, args.b + b_panel * bytes, 0, steps, rows, columns, sums);
    store_block(args, a_panel, b_panel, rows, columns, sums);
  }
}

#if defined(FASTBERT_AMX)
// AMX reads rows, so that a's panels must be transposed: several at a time, which stay in the second-level cache while
// the panels of b pass by. Blocks are numbered accordingly: which one is which is no caller's concern.
void gemm_transposed_amx(const GemmTransposedArgs& args, int64_t begin, int64_t end) {
  constexpr int64_t kCached = 512 << 10, kMostPanels = 8;
  static thread_local Scratch scratch;
  const int64_t bytes = panel_bytes(args.format, args.tokens), steps = bytes / kStepBytes;
  const int64_t whole = steps / kAmxSteps * kAmxSteps, stride = whole * 4 + 64, panel_rows = kPanel * stride;
  const int64_t a_panels = num_panels(args.a_features), b_panels = num_panels(args.b_features);
  const int64_t group = std::clamp<int64_t>(kCached / panel_rows, 1, kMostPanels);
  char* transposed = scratch.get(group * panel_rows);
  alignas(64) char sums[kPanel * kStepBytes];
  AmxTiles tiles;
  int64_t held[kMostPanels];  // the panel that each slot has
  std::fill_n(held, kMostPanels, -1);
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block / (group * b_panels) * group, count = std::min(group, a_panels - first);
    const int64_t rest = block - first * b_panels, b_panel = rest / count, a_panel = first + rest % count;
    const char *a = args.a + a_panel * bytes, *b = args.b + b_panel * bytes;
    const int64_t rows = std::min(kPanel, args.a_features - a_panel * kPanel);
    const int64_t columns = std::min(kPanel, args.b_features - b_panel * kPanel);
    char* a_rows = transposed + (a_panel - first) * panel_rows;
    if (held[a_panel - first] != a_panel) {
      amx_transpose(a, whole, rows, stride, a_rows);
      held[a_panel - first] = a_panel;
    }
    for (int64_t step = 0; step < whole; step += kAmxBlockSteps) {
      tiles.product<BFloat16Dot>(rows, a_rows + step * 4, stride, b + step * kStepBytes,
                                 std::min(kAmxBlockSteps, whole - step), columns, step > 0, sums);
    }
    if (whole < steps || steps == 0) transposed_block<BFloat16Dot>(a, b, whole, steps, rows, columns, sums);
    store_block(args, a_panel, b_panel, rows, columns, sums);
  }
}
#endif

void gemm_transposed(const GemmTransposedArgs& args, int64_t begin, int64_t end) {
#if defined(FASTBERT_AMX)
  if (args.format == DType::kBFloat16) return gemm_transposed_amx(args, begin, end);
#elif defined(FASTBERT_BF16)
  if (args.format == DType::kBFloat16) return gemm_transposed_blocks<BFloat16Dot>(args, begin, end);
#endif
  gemm_transposed_blocks<Float32Dot>(args, begin, end);
}

template <typename T, typename Out>
void column_sums_typed(const T* x, int64_t stride, int64_t rows, Out* out, int64_t begin, int64_t end) {
  constexpr int64_t kRows = 128;  // in a chain, for the sums' sake
  for (int64_t c = begin; c < end; c += kWidth) {
    Floats total = set1(0.0f);
    for (int64_t first = 0; first < rows; first += kRows) {
      Floats part = set1(0.0f);
      for (int64_t r = first; r < std::min(rows, first + kRows); ++r) {
        part = add(part, load_columns(x + r * stride + c, end - c));
      }
      total = add(total, part);
    }
    store_columns(out + c, total, end - c);
  }
}

void column_sums(const RowsArg& x, int64_t rows, void* out, DType out_dtype, int64_t begin, int64_t end) {
  const bool to_float32 = out_dtype == DType::kFloat32;
  if (x.dtype == DType::kFloat32) {
    const auto* data = static_cast<const float*>(x.data);
    return to_float32 ? column_sums_typed(data, x.stride, rows, static_cast<float*>(out), begin, end)
                      : column_sums_typed(data, x.stride, rows, static_cast<BFloat16*>(out), begin, end);
  }
  const auto* data = static_cast<const BFloat16*>(x.data);
  to_float32 ? column_sums_typed(data, x.stride, rows, static_cast<float*>(out), begin, end)
             : column_sums_typed(data, x.stride, rows, static_cast<BFloat16*>(out), begin, end);
}

template <typename T>
void activation_bwd_typed(const ActivationBwd& args, int64_t begin, int64_t end) {
  const auto *dout = static_cast<const T*>(args.dout), *pre = static_cast<const T*>(args.pre);
  for (int64_t i = begin; i < end; i += kWidth) {
    const Floats slope = activation_slope<sizeof(T) == 4>(args.activation, load_columns(pre + i, end - i));
    store_columns(static_cast<T*>(args.dpre) + i, mul(load_columns(dout + i, end - i), slope), end - i);
  }
}

void activation_bwd(const ActivationBwd& args, int64_t begin, int64_t end) {
  args.dtype == DType::kFloat32 ? activation_bwd_typed<float>(args, begin, end)
                                : activation_bwd_typed<BFloat16>(args, begin, end);
}
