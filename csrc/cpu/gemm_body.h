// GEMM for one ISA; included by gemm.cpp through foreach_isa.h.
#include "../include/gemm_tile.h"
#include "convert_body.h"
#include "epilogue_body.h"
#include "pack_body.h"
#include "residuals_body.h"

// Steps that are summed in one go: a chain of 3072 fp32 additions would lose two more bits than the blocked sums of
// other libraries. The sums of bf16 pairs are half as many, and what they lose is far below the operands' own rounding;
// int8 sums are exact.
template <typename Dot>
constexpr int64_t kGemmChain = std::is_same_v<Dot, Float32Dot> ? 256 : INT64_MAX;

// Steps of a panel that all rows of a block go through before the next ones: 96 KB of panel, and as much that is on its
// way, leave room in the second-level cache for the rows. As many for any number of rows: a row's sums are then added
// up in one order, and its bits are the same whatever is beside it.
constexpr int64_t kBlockSteps = 384;
// AMX takes a panel faster than the second-level cache gives it: the rows pass by a stretch that stays in the first.
constexpr int64_t kAmxBlockSteps = 128;

// A part of one product: steps [0, steps) of a panel and of the rows at `x`, and where the part begins that comes next.
struct Part {
  const char* x;
  int64_t x_stride;
  const char* panel;
  int64_t steps;
  const char* next;
};

// A tile that passes float32's panels alone, which come slowest, fetches all lines of its own panel so far ahead: 4 to
// 6 rows take 0.93 to 1.00 of the time (EPYC, Zen 4). bfloat16 and int8 had 1.02.
constexpr int64_t kFetchAhead = 12288;

// The cache lines a step that tile `index` of a block of rows fetches of what comes after the part, after the `before`
// lines a step of the tiles before it: four in all, spread over the tiles, since fetches that come too fast wait for
// the first-level cache's miss buffers. A single tile leaves it to the hardware.
struct Fetch {
  int64_t lines, before;

  static Fetch of(int64_t index, int64_t tiles, int64_t lines = 4) {
    if (tiles <= 1) return {0, 0};
    const int64_t before = (index * lines + tiles / 2) / tiles;
    return {((index + 1) * lines + tiles / 2) / tiles - before, before};
  }
};

// The rows of a block in tiles that are as equal as may be: one of two rows, beside those of six, would need the panel
// faster than the caches give it. 8 rows as 4 and 4 instead of 6 and 2: 1.07 to 1.2 times as fast. AMX multiplies 16
// rows or less in the same time, so that its tiles are of whole 16.
struct RowTiles {
  int64_t rows, unit, units, count;

  static RowTiles of(int64_t rows) {
    return {rows, 1, rows, rows <= kMostTileRows ? 1 : (rows + kTileRows - 1) / kTileRows};
  }
  static RowTiles of_amx(int64_t rows) {
    constexpr int64_t kUnit = kAmxRows / 2;
    return {rows, kUnit, (rows + kUnit - 1) / kUnit, (rows + kAmxRows - 1) / kAmxRows};
  }

  int64_t begin(int64_t tile) const {
    return std::min(rows, unit * (tile * (units / count) + std::min(tile, units % count)));
  }
  int64_t size(int64_t tile) const { return begin(tile + 1) - begin(tile); }
};

// One part for one tile, added to `sums` if `accumulate`.
template <typename Dot>
FASTBERT_SIMD void tile_part(const Part& part, const RowTiles& tiles, int64_t index, int64_t columns, bool accumulate,
                             char* sums) {
  const char* x = part.x + tiles.begin(index) * part.x_stride;
  constexpr int64_t kColumns = kTileVectors * kWidth, kProducts = kPanel / kColumns;
  if constexpr (kProducts > 1) {  // which ask in turn for an equal share of the lines that come next
    const int64_t lines = part.steps * kStepBytes / 64, shares = tiles.count * kProducts;
    const int64_t fetches = tiles.count > 1 ? (lines + shares - 1) / shares : 0;
    const char* next = part.next + index * kProducts * fetches * 64;
    for (int64_t c = 0; c < columns; c += kColumns) {
      for (int64_t i = 0; i < fetches; ++i, next += 64) __builtin_prefetch(next, 0, 2);
      for (int64_t step = 0; step == 0 || step < part.steps; step += kGemmChain<Dot>) {
        const int64_t count = std::min(part.steps - step, kGemmChain<Dot>);
        tile_rows<Dot>(tiles.size(index), x + step * 4, part.x_stride, 4, part.panel + step * kStepBytes + c * 4, count,
                       kColumns, accumulate || step > 0, sums + c * 4);
      }
    }
    return;
  }
  const bool fetches_own = std::is_same_v<Dot, Float32Dot> && tiles.count == 1;
  const Fetch fetch = fetches_own ? Fetch{4, 0} : Fetch::of(index, tiles.count);
  for (int64_t step = 0; step == 0 || step < part.steps; step += kGemmChain<Dot>) {
    const int64_t count = std::min(part.steps - step, kGemmChain<Dot>);
    const char* panel = part.panel + step * kStepBytes;
    const char* next =
        fetches_own ? panel + kFetchAhead : part.next + (fetch.before * part.steps + step * fetch.lines) * 64;
    tile_rows<Dot>(tiles.size(index), x + step * 4, part.x_stride, 4, panel, count, columns, accumulate || step > 0,
                   sums, fetch.lines, next);
  }
}

// The same by AMX; steps that are no whole group go the ordinary way.
template <typename Dot>
void amx_part(AmxTiles& amx, const Part& part, const RowTiles& tiles, int64_t index, int64_t columns, bool accumulate,
              char* sums) {
  const char* x = part.x + tiles.begin(index) * part.x_stride;
  const int64_t rows = tiles.size(index), whole = part.steps / kAmxSteps * kAmxSteps, groups = whole / kAmxSteps;
  if (whole > 0) {
    // Two squares of 32 columns pass each group of steps: half of its lines for each.
    const Fetch fetch = Fetch::of(index, tiles.count, 4 * kAmxSteps / 2);
    amx.product<Dot>(rows, x, part.x_stride, part.panel, whole, columns, accumulate, sums, fetch.lines,
                     part.next + fetch.before * 2 * groups * 64);
  }
  if (whole == part.steps) return;
  const Part rest{x + whole * 4, part.x_stride, part.panel + whole * kStepBytes, part.steps - whole, part.next};
  const RowTiles rest_tiles = RowTiles::of(rows);
  for (int64_t i = 0; i < rest_tiles.count; ++i) {
    tile_part<Dot>(rest, rest_tiles, i, columns, accumulate || whole > 0, sums + rest_tiles.begin(i) * kStepBytes);
  }
}

// Panel p of a weight: packed before, or now, into memory of the thread's own that the next one takes. The whole panel,
// though less would stay in a nearer cache: rows are read from end to end, which is what the hardware fetches best.
const char* panel_of(const PackedWeight& weight, int64_t p) {
  static thread_local Scratch memory;
  const int64_t bytes = panel_bytes(weight.format, weight.in_features);
  if (weight.packed != nullptr) return weight.packed + p * bytes;
  PackArgs args = weight.source;
  args.weight = static_cast<const char*>(args.weight) + p * kPanel * args.out_stride * element_size(args.dtype);
  args.out_features = std::min(kPanel, args.out_features - p * kPanel);
  args.packed = memory.get(bytes);
  (pack_panels)(args, 0, 1);  // this instruction set's, not the one in the namespace around that chooses among them
  return args.packed;
}

// One target over a block of rows; what its panels and rows are, and what they leave for a gated pair.
struct Work {
  const GemmTarget& target;
  Rows x;
  StepsOfRows steps;  // x, where a panel was split
  const Rows* addends;
  Channels channels;
  Pair pair;
  float* gate;  // (rows of the block, kPanel)
};

// `next`: the panel that comes after them, null for the one that lies after them.
template <typename Dot>
void gemm_panels(const GemmArgs& args, const Work& work, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end,
                 const char* next, Scratch& scratch) {
  constexpr bool kInt8 = std::is_same_v<Dot, Int8Dot>;
  const GemmTarget& target = work.target;
  const int64_t block_rows = row_end - row_begin;
  constexpr int64_t kSteps = kUsesAmx<Dot> ? kAmxBlockSteps : kBlockSteps;
  const RowTiles tiles = kUsesAmx<Dot> ? RowTiles::of_amx(block_rows) : RowTiles::of(block_rows);
  char* sums = scratch.get(block_rows * kStepBytes);
  [[maybe_unused]] AmxTiles amx;
  for (int64_t p = begin; p < end; ++p) {
    const int64_t columns = std::min(kPanel, target.weight.out_features - p * kPanel);
    for (int64_t product = 0; product <= target.num_addends; ++product) {
      const PackedWeight& weight = product == 0 ? target.weight : target.addends[product - 1].weight;
      const Rows& rows = product == 0 ? work.x : work.addends[product - 1];
      const int64_t steps = panel_bytes(weight.format, weight.in_features) / kStepBytes;
      const char* const panel_begin = panel_of(weight, p);
      bool first = product == 0;
      if constexpr (kIsSplit<Dot>) {
        first = !residual_sums<Dot>(work.steps, block_rows, weight.residuals, p * kPanel, columns, sums);
      }
      for (int64_t step = 0; step == 0 || step < steps; step += kSteps, first = false) {
        const bool last = product == target.num_addends && step + kSteps >= steps;
        const int64_t count = std::min(kSteps, steps - step);
        const char* panel = panel_begin + step * kStepBytes;
        const Part part{rows.data + step * 4, rows.stride, panel, count,
                        last && p + 1 == end && next != nullptr ? next : panel + count * kStepBytes};
        for (int64_t i = 0; i < tiles.count; ++i) {
          const int64_t row = tiles.begin(i);
          char* tile_sums = sums + row * kStepBytes;
          if constexpr (kUsesAmx<Dot>) {
            amx_part<Dot>(amx, part, tiles, i, columns, !first, tile_sums);
          } else {
            tile_part<Dot>(part, tiles, i, columns, !first, tile_sums);
          }
          if (!last) continue;
          const float* row_scale = work.x.scale == nullptr ? nullptr : work.x.scale + row;
          float* gate = work.gate == nullptr ? nullptr : work.gate + row * kPanel;
          const Tile tile{row_begin + row, tiles.size(i), p * kPanel, tile_sums, row_scale, gate};
          if (args.out_dtype == DType::kFloat32) {
            finish_tile<float, kInt8>(target, work.channels, tile, work.pair);
          } else {
            finish_tile<BFloat16, kInt8>(target, work.channels, tile, work.pair);
          }
        }
      }
    }
  }
}

void run_panels(const GemmArgs& args, const Work& work, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end,
                const char* next, Scratch& sums) {
  switch (work.target.weight.format) {
    case DType::kFloat32:
      return gemm_panels<Float32Dot>(args, work, row_begin, row_end, begin, end, next, sums);
    case DType::kBFloat16:
#if defined(FASTBERT_BF16)
      gemm_panels<BFloat16Dot>(args, work, row_begin, row_end, begin, end, next, sums);
#endif
      return;
    case DType::kInt8:
      return gemm_panels<Int8Dot>(args, work, row_begin, row_end, begin, end, next, sums);
  }
}

void convert_rows(const RowsArg& x, int64_t begin, int64_t end, const PackedWeight& weight, char* out, float* scales) {
  x.dtype == DType::kFloat32 ? convert_typed<float>(x, begin, end, weight, out, scales)
                             : convert_typed<BFloat16>(x, begin, end, weight, out, scales);
}

// Of the panels [begin, end) of a target, in memory that is written anew.
Channels channels_of(const GemmTarget& target, int64_t begin, int64_t end, std::vector<float>& memory) {
  const int64_t first_column = begin * kPanel, columns = (end - begin) * kPanel;
  const int64_t count = std::min(columns, target.weight.out_features - first_column);
  memory.assign(static_cast<size_t>(2 * columns), 0.0f);
  float *bias = memory.data(), *scale = bias + columns;
  if (target.bias != nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = first_column + i;
      bias[i] = target.bias_dtype == DType::kFloat32 ? static_cast<const float*>(target.bias)[at]
                                                     : to_float(static_cast<const BFloat16*>(target.bias)[at]);
    }
  }
  if (target.weight.format == DType::kInt8) std::copy_n(target.weight.channel_scale + first_column, count, scale);
  return {bias - first_column, scale - first_column};
}

// A gated target: panel by panel the gate's, whose results stay in the cache, and its own.
void run_pairs(const GemmArgs& args, const Work& gate, const Work& up, int64_t row_begin, int64_t row_end,
               int64_t begin, int64_t end, const char* next, Scratch& sums) {
  const auto panel = [](const PackedWeight& weight, int64_t p) {
    return weight.packed == nullptr ? nullptr : weight.packed + p * panel_bytes(weight.format, weight.in_features);
  };
  for (int64_t p = begin; p < end; ++p) {
    run_panels(args, gate, row_begin, row_end, p, p + 1, panel(up.target.weight, p), sums);
    const char* behind = p + 1 < end ? panel(gate.target.weight, p + 1) : next;
    run_panels(args, up, row_begin, row_end, p, p + 1, behind, sums);
  }
}

void gemm(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  static thread_local Prepared prepared, prepared_gate;
  static thread_local Scratch sums, gates, steps_memory, gate_steps_memory;
  static thread_local std::deque<Prepared> prepared_addends;
  static thread_local std::vector<float> channels, gate_channels;
  const int64_t rows = row_end - row_begin;
  Rows x{nullptr, 0, nullptr};
  StepsOfRows steps{nullptr, 0};
  const PackedWeight* last = nullptr;  // the weight that x was prepared for
  int64_t first = 0;
  for (int64_t t = 0; t < args.num_targets; ++t) {
    const GemmTarget& target = args.targets[t];
    const PackedWeight& weight = target.weight;
    const int64_t panels = num_panels(weight.out_features);
    const int64_t begin = std::max<int64_t>(panel_begin - first, 0), end = std::min(panel_end - first, panels);
    first += panels;
    if (begin >= end) continue;
    const char* next = first >= panel_end ? args.next : nullptr;
    if (last == nullptr || !takes_same_rows(*last, weight)) {
      x = prepared.prepare(args.x, row_begin, rows, weight);
      if (weight.residuals.begin != nullptr) {
        steps = StepsOfRows::of(x, rows, row_bytes(weight.format, weight.in_features) / 4, steps_memory);
      }
      last = &weight;
    }
    std::vector<Rows> addends;
    while (static_cast<int64_t>(prepared_addends.size()) < target.num_addends) prepared_addends.emplace_back();
    for (int64_t i = 0; i < target.num_addends; ++i) {
      const GemmAddend& addend = target.addends[i];
      addends.push_back(prepared_addends[i].prepare(addend.x, row_begin, rows, addend.weight));
    }
    Work work{target, x, steps, addends.data(), channels_of(target, begin, end, channels), Pair::kNone, nullptr};
    if (target.gate == nullptr) {
      run_panels(args, work, row_begin, row_end, begin, end, next, sums);
      continue;
    }
    work.pair = Pair::kUp;
    work.gate = reinterpret_cast<float*>(gates.get(rows * kStepBytes));
    Work gate{*target.gate, x,        steps, nullptr, channels_of(*target.gate, begin, end, gate_channels),
              Pair::kGate,  work.gate};
    if (!takes_same_rows(weight, gate.target.weight)) {
      const PackedWeight& of_gate = gate.target.weight;
      gate.x = prepared_gate.prepare(args.x, row_begin, rows, of_gate);
      if (of_gate.residuals.begin != nullptr) {
        gate.steps =
            StepsOfRows::of(gate.x, rows, row_bytes(of_gate.format, of_gate.in_features) / 4, gate_steps_memory);
      }
    }
    run_pairs(args, gate, work, row_begin, row_end, begin, end, next, sums);
  }
}

// Sums (rows, kPanel) of one block, on their way out: past the caches where whole lines are written, for a model's
// gradients are read when all of them are there.
FASTBERT_SIMD void store_block(const GemmTransposedArgs& args, int64_t a_panel, int64_t b_panel, int64_t rows,
                               int64_t columns, const char* sums) {
  const int64_t first = a_panel * kPanel * args.b_features + b_panel * kPanel;
  const auto* line = static_cast<const float*>(args.out) + first;
  const bool streams = args.out_dtype == DType::kFloat32 && columns == kPanel && args.b_features % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(line) % 64 == 0;
  constexpr int64_t kVectors = kPanel / kWidth;
  Floats squares[kVectors];
  for (int64_t v = 0; v < kVectors; ++v) squares[v] = set1(0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = first + r * args.b_features;
    for (int64_t c = 0; c < columns; c += kWidth) {
      const Floats x = load(reinterpret_cast<const float*>(sums + r * kStepBytes) + c);
      squares[c / kWidth] = fma(x, x, squares[c / kWidth]);
      if (streams) {
        stream(static_cast<float*>(args.out) + at + c, x);
      } else if (args.out_dtype == DType::kFloat32) {
        store_columns(static_cast<float*>(args.out) + at + c, x, columns - c);
      } else {
        store_columns(static_cast<BFloat16*>(args.out) + at + c, x, columns - c);
      }
    }
  }
  if (args.squares == nullptr) return;
  double total = 0;
  for (int64_t c = 0; c < columns; ++c) total += static_cast<double>(reinterpret_cast<const float*>(squares)[c]);
  args.squares[a_panel * num_panels(args.b_features) + b_panel] = total;
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
  if (args.format == DType::kFloat32) {
    gemm_transposed_blocks<Float32Dot>(args, begin, end);
  } else {
#if defined(FASTBERT_AMX)
    gemm_transposed_amx(args, begin, end);
#elif defined(FASTBERT_BF16)
    gemm_transposed_blocks<BFloat16Dot>(args, begin, end);
#endif
  }
  end_of_streams();
}

// By the same tiles as products, a chain at a time, for the sums' sake.
template <typename Dot>
void panel_sums_typed(const char* panel, const char* one, int64_t steps, void* out, DType out_dtype, int64_t columns) {
  constexpr int64_t kChain = 64;
  alignas(64) char sums[kStepBytes];
  int64_t step = 0;
  do {
    tile_row<Dot, 1>(one, 0, 0, panel + step * kStepBytes, std::min(kChain, steps - step), columns, step > 0, sums, 0,
                     nullptr);
    step += kChain;
  } while (step < steps);
  const auto* floats = reinterpret_cast<const float*>(sums);
  for (int64_t c = 0; c < columns; ++c) {
    if (out_dtype == DType::kFloat32) {
      static_cast<float*>(out)[c] = floats[c];
    } else {
      static_cast<BFloat16*>(out)[c] = from_float<BFloat16>(floats[c]);
    }
  }
}

void panel_sums(const char* panel, DType format, int64_t in_features, void* out, DType out_dtype, int64_t columns) {
#if defined(FASTBERT_BF16)
  if (format == DType::kBFloat16) {
    const BFloat16 ones[2] = {from_float<BFloat16>(1.0f), from_float<BFloat16>(1.0f)};
    return panel_sums_typed<BFloat16Dot>(panel, reinterpret_cast<const char*>(ones), (in_features + 1) / 2, out,
                                         out_dtype, columns);
  }
#endif
  const float one = 1.0f;
  panel_sums_typed<Float32Dot>(panel, reinterpret_cast<const char*>(&one), in_features, out, out_dtype, columns);
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
