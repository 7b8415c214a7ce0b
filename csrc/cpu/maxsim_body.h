// MaxSim for one ISA; included by maxsim.cpp through foreach_isa.h.
//
// Documents' tokens are rows and queries' tokens columns of a product. Of a block of rows and a panel the sums stay in
// the first-level cache, where the largest of each column is taken, row by row: nothing of tokens x tokens is written,
// and no vector is added up across its lanes.
#include "../include/gemm_tile.h"
#include "convert_body.h"
#include "residuals_body.h"

constexpr int64_t kMaxSimRows = 96;  // of a block: 24 KB of sums

typedef int32_t Lanes __attribute__((vector_size(kWidth * 4)));
typedef float FloatLanes __attribute__((vector_size(kWidth * 4)));

// Steps of one chain of additions: of 256 numbers, as products of float32 have it (gemm_body.h), since the rounding of
// a longer one is seen in the scores. int8's sums are exact.
template <typename Dot>
constexpr int64_t kMaxSimChain = std::is_same_v<Dot, Float32Dot> ? 256
                                 : std::is_same_v<Dot, Int8Dot>  ? 1 << 30
                                                                 : 128;

// Columns of a tile. Where a tile is narrower than a panel, the queries' panels are laid out in strips of its width,
// one behind the other: the lines of a strip within a panel are four apart, and those of 128 steps take all ways of a
// quarter of a first-level cache of 32 KB. Beside the rows no line stayed until the next tile came (by simulation of
// that cache: 1.1 misses a step; in strips 0.2).
constexpr int64_t kStrip = kTileVectors * kWidth;

// `count` panels, from as they are packed to strips.
void maxsim_strips(char* panels, int64_t count, int64_t steps) {
  if constexpr (kStrip < kPanel) {
    static thread_local Scratch memory;
    char* packed = memory.get(steps * kStepBytes);
    for (int64_t p = 0; p < count; ++p) {
      char* panel = panels + p * steps * kStepBytes;
      std::memcpy(packed, panel, static_cast<size_t>(steps * kStepBytes));
      for (int64_t c = 0; c < kPanel; c += kStrip) {
        for (int64_t step = 0; step < steps; ++step, panel += kStrip * 4) {
          std::memcpy(panel, packed + step * kStepBytes + c * 4, kStrip * 4);
        }
      }
    }
  }
}

// Memory that is read next, the block behind this one: each tile asks for the share of its rows.
struct Ahead {
  const char* next;
  int64_t bytes;

  const char* at(int64_t row, int64_t rows) const { return next + bytes * row / rows; }

  FASTBERT_SIMD void fetch(int64_t row, int64_t count, int64_t rows) const {
    const int64_t length = bytes * count / rows;
    for (int64_t i = 0; i < length; i += 64) __builtin_prefetch(at(row, rows) + i, 0, 2);
  }
};

// sums (rows, kPanel) = rows of x times `columns` of the panel, added to what is there if `accumulate`. int8 sums are
// exact whole numbers.
template <typename Dot>
void maxsim_product(int64_t rows, const Rows& x, const char* panel, int64_t steps, int64_t columns, Ahead ahead,
                    bool accumulate, char* sums) {
  int64_t whole = 0;
  if constexpr (kUsesAmx<Dot>) {
    whole = steps / kAmxSteps * kAmxSteps;
    if (whole > 0) {
      ahead.fetch(0, 1, 1);
      AmxTiles amx;
      static thread_local Scratch memory;
      for (int64_t step = 0; step < whole; step += kMaxSimChain<Dot>) {
        // What a tile accumulates to goes on with the same chain: another one has sums of its own.
        char* to = step == 0 ? sums : memory.get(kMaxSimRows * kStepBytes);
        amx.product<Dot>(rows, x.data + step * 4, x.stride, panel + step * kStepBytes,
                         std::min(whole - step, kMaxSimChain<Dot>), columns, accumulate && step == 0, to);
        for (int64_t r = 0; step > 0 && r < rows; ++r) {
          for (int64_t c = 0; c < columns; c += kWidth) {
            auto* sum = reinterpret_cast<float*>(sums + r * kStepBytes) + c;
            store(sum, add(load(sum), load(reinterpret_cast<const float*>(to + r * kStepBytes) + c)));
          }
        }
      }
    }
    if (whole == steps) return;
  }
  for (int64_t row = 0; row < rows;) {
    int64_t height = std::min<int64_t>(kTileRows, rows - row);
    // A query of 32 tokens fills half a panel: twice the rows then, where a tile has the panel's width.
    constexpr bool kHasNarrow = kTileVectors * kWidth == kPanel;
    const bool narrow = kHasNarrow && columns <= kPanel / 2 && rows - row >= 2 * kTileRows;
    if (narrow) height = 2 * kTileRows;
    if (whole == 0 && !narrow) ahead.fetch(row, height, rows);
    for (int64_t step = whole; step == whole || step < steps; step += kMaxSimChain<Dot>) {
      const int64_t count = std::min(steps - step, kMaxSimChain<Dot>);
      const char *from = x.data + row * x.stride + step * 4, *of_panel = panel + step * kStrip * 4;
      char* to = sums + row * kStepBytes;
      if (narrow) {
        if constexpr (kHasNarrow) {
          // Its rows are 3/4 of a line a step. Fetched step by step 1,000 documents take 0.8 of the time (Zen 5): all
          // lines at once are more than may be on their way.
          if (ahead.bytes > 0) {
            tile<Dot, 2 * kTileRows, kTileVectors / 2, 1>(from, x.stride, 4, of_panel, count, accumulate || step > 0,
                                                          to, ahead.at(row, rows) + step * 64);
          } else {
            tile<Dot, 2 * kTileRows, kTileVectors / 2>(from, x.stride, 4, of_panel, count, accumulate || step > 0, to);
          }
        }
      } else {
        for (int64_t c = 0; c < columns; c += kStrip) {
          tile_rows<Dot, kStepBytes, kStrip * 4>(height, from, x.stride, 4, of_panel + c * steps * 4, count, kStrip,
                                                 accumulate || step > 0, to + c * 4);
        }
      }
    }
    row += height;
  }
}

// The larger of `best` and of rows of `sums`, for `columns`; `winners` says which row it was, the first of several, and
// the first is `row`. A NaN is larger than any number. int8: sums are whole numbers, less `offsets`, times the row's
// scale.
template <bool kInt8, bool kWinners>
void take_largest(const char* sums, int64_t rows, const float* scales, const int32_t* offsets, int64_t columns,
                  int32_t row, float* best, int32_t* winners) {
  constexpr int kVectors = 2;  // side by side, since each row waits for the one before
  for (int64_t c = 0; c < columns; c += kVectors * kWidth) {
    FloatLanes top[kVectors];
    [[maybe_unused]] Lanes winner[kVectors], is_nan[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      top[v] = (FloatLanes)load(best + c + v * kWidth);
      is_nan[v] = top[v] != top[v];
    }
    if constexpr (kWinners) {
      for (int v = 0; v < kVectors; ++v) winner[v] = (Lanes)load(winners + c + v * kWidth);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const auto* of_row = reinterpret_cast<const float*>(sums + r * kStepBytes) + c;
      for (int v = 0; v < kVectors; ++v) {
        auto x = (FloatLanes)load(of_row + v * kWidth);
        if constexpr (kInt8) {
          const auto* whole = reinterpret_cast<const int32_t*>(of_row) + v * kWidth;
          x = (FloatLanes)mul(to_floats(sub(load(whole), load(offsets + c + v * kWidth))), set1(scales[r]));
        }
        if constexpr (kWinners) {
          const Lanes takes = (x > top[v]) | (x != x);
          top[v] = (FloatLanes)(((Lanes)x & takes) | ((Lanes)top[v] & ~takes));
          winner[v] = ((Lanes)set1(row + static_cast<int32_t>(r)) & takes) | (winner[v] & ~takes);
        } else {
          is_nan[v] |= x != x;
          top[v] = (FloatLanes)max((Floats)top[v], (Floats)x);  // of a NaN and a number the hardware takes either
        }
      }
    }
    for (int v = 0; v < kVectors && !kWinners; ++v) top[v] = (FloatLanes)((Lanes)top[v] | is_nan[v]);
    for (int v = 0; v < kVectors; ++v) store(best + c + v * kWidth, (Floats)top[v]);
    if constexpr (kWinners) {
      for (int v = 0; v < kVectors; ++v) store(winners + c + v * kWidth, (Ints)winner[v]);
    }
  }
}

// Rows [row, row + count) of the documents as the product takes them: bytes with an offset of 128.
Rows maxsim_rows(const MaxSimFwd& args, int64_t row, int64_t count, Prepared& prepared) {
  const RowsArg& x = args.documents;
  if (x.dtype != DType::kInt8) {
    PackedWeight weight{};
    weight.format = args.format;
    weight.in_features = args.width;
    return prepared.prepare(x, row, count, weight);
  }
  const int64_t stride = row_bytes(args.format, args.width);
  auto* out = reinterpret_cast<uint8_t*>(prepared.scratch.get(count * stride));
  for (int64_t r = 0; r < count; ++r) {
    const auto* from = static_cast<const uint8_t*>(x.data) + (row + r) * x.stride;
    uint8_t* to = out + r * stride;
    for (int64_t i = args.width; i < stride; ++i) to[i] = 0;
#pragma omp simd
    for (int64_t i = 0; i < args.width; ++i) to[i] = static_cast<uint8_t>(from[i] ^ 0x80);
  }
  return {reinterpret_cast<const char*>(out), stride, x.scales + row};
}

// Where the queries' columns are, by panels.
struct Columns {
  int64_t begin, end, first_panel, count;  // count: of the panels' columns, all of them

  static Columns of(const MaxSimFwd& args, int64_t query_begin, int64_t query_end) {
    const int64_t last = query_end - 1, begin = args.columns[query_begin];
    const int64_t end = args.columns[last] + args.cu_seqlens_q[last + 1] - args.cu_seqlens_q[last];
    const int64_t first = begin / kPanel;
    return {begin - first * kPanel, end - first * kPanel, first, num_panels(end - first * kPanel) * kPanel};
  }
};

template <typename Dot, bool kWinners>
void maxsim_typed(const MaxSimFwd& args, int64_t document_begin, int64_t document_end, int64_t query_begin,
                  int64_t query_end, float* scores, int64_t score_stride, int32_t* winners, int64_t winner_stride) {
  static thread_local Prepared prepared;
  static thread_local Scratch sums_memory, best_memory, steps_memory;
  constexpr bool kInt8 = std::is_same_v<Dot, Int8Dot>;
  const int32_t* cu = args.cu_seqlens_d;
  const Columns columns = Columns::of(args, query_begin, query_end);
  const int64_t panel_size = panel_bytes(args.format, args.width), steps = panel_size / kStepBytes;
  char* sums = sums_memory.get(kMaxSimRows * kStepBytes);
  for (int64_t first = document_begin; first < document_end;) {
    // As many documents as fill a block, or one.
    int64_t last = first + 1;
    while (last < document_end && last - first < kMaxSimRows && cu[last + 1] - cu[first] <= kMaxSimRows) ++last;
    const int64_t documents = last - first;
    auto* best = reinterpret_cast<float*>(best_memory.get(documents * columns.count * (kWinners ? 8 : 4)));
    int32_t* won = kWinners ? reinterpret_cast<int32_t*>(best + documents * columns.count) : nullptr;
    for (int64_t d = 0; d < documents; ++d) {
      std::fill_n(best + d * columns.count, columns.count, -__builtin_inff());
      const int32_t begin = cu[first + d];
      if (kWinners) std::fill_n(won + d * columns.count, columns.count, begin < cu[first + d + 1] ? begin : -1);
    }
    for (int64_t row = cu[first]; row < cu[last]; row += kMaxSimRows) {
      const int64_t rows = std::min<int64_t>(kMaxSimRows, cu[last] - row);
      const Rows x = maxsim_rows(args, row, rows, prepared);
      [[maybe_unused]] StepsOfRows steps_of_rows{nullptr, 0};
      if constexpr (kIsSplit<Dot>) steps_of_rows = StepsOfRows::of(x, rows, steps, steps_memory);
      // A block passes in the time in which memory gives the next one: 1.2 times as fast (AVX2, Zen 3).
      const int64_t row_size = args.documents.stride * element_size(args.documents.dtype);
      const int64_t left = std::min<int64_t>(rows, cu[document_end] - (row + rows));
      const Ahead ahead{static_cast<const char*>(args.documents.data) + (row + rows) * row_size, left * row_size};
      for (int64_t c = 0; c < columns.count; c += kPanel) {
        const int64_t width = std::min(kPanel, columns.end - c);
        const char* panel = args.panels + (columns.first_panel + c / kPanel) * panel_size;
        bool accumulate = false;
        if constexpr (kIsSplit<Dot>) {
          accumulate =
              residual_sums<Dot>(steps_of_rows, rows, args.residuals, columns.first_panel * kPanel + c, width, sums);
        }
        maxsim_product<Dot>(rows, x, panel, steps, width, c == 0 ? ahead : Ahead{nullptr, 0}, accumulate, sums);
        for (int64_t d = 0; d < documents; ++d) {
          const int64_t begin = std::max<int64_t>(row, cu[first + d]);
          const int64_t end = std::min<int64_t>(row + rows, cu[first + d + 1]);
          if (begin >= end) continue;
          const int64_t at = d * columns.count + c;
          const float* scales = kInt8 ? x.scale + (begin - row) : nullptr;
          const int32_t* offsets = kInt8 ? args.offsets + columns.first_panel * kPanel + c : nullptr;
          take_largest<kInt8, kWinners>(sums + (begin - row) * kStepBytes, end - begin, scales, offsets, width,
                                        static_cast<int32_t>(begin), best + at, kWinners ? won + at : nullptr);
        }
      }
    }
    for (int64_t d = 0; d < documents; ++d) {
      const int64_t document = first + d - document_begin;
      const bool is_empty = cu[first + d] == cu[first + d + 1];
      for (int64_t q = query_begin; q < query_end; ++q) {
        const float* of_query = best + d * columns.count + args.columns[q] - columns.first_panel * kPanel;
        const int64_t token = args.cu_seqlens_q[q];
        double score = 0;
        for (int64_t t = 0; t < args.cu_seqlens_q[q + 1] - token; ++t) {
          score += kInt8 ? of_query[t] * args.query_scales[token + t] : of_query[t];
        }
        scores[(q - query_begin) * score_stride + document] = is_empty ? kNoDocument : static_cast<float>(score);
      }
      if (kWinners) {
        std::copy_n(won + d * columns.count + columns.begin, columns.end - columns.begin,
                    winners + document * winner_stride);
      }
    }
    first = last;
  }
}

template <typename Dot>
void maxsim_with(const MaxSimFwd& args, int64_t document_begin, int64_t document_end, int64_t query_begin,
                 int64_t query_end, float* scores, int64_t score_stride, int32_t* winners, int64_t winner_stride) {
  winners == nullptr ? maxsim_typed<Dot, false>(args, document_begin, document_end, query_begin, query_end, scores,
                                                score_stride, winners, winner_stride)
                     : maxsim_typed<Dot, true>(args, document_begin, document_end, query_begin, query_end, scores,
                                               score_stride, winners, winner_stride);
}

void maxsim_fwd(const MaxSimFwd& args, int64_t document_begin, int64_t document_end, int64_t query_begin,
                int64_t query_end, float* scores, int64_t score_stride, int32_t* winners, int64_t winner_stride) {
#if defined(FASTBERT_BF16)
  if (args.format == DType::kBFloat16) {
    return maxsim_with<BFloat16Dot>(args, document_begin, document_end, query_begin, query_end, scores, score_stride,
                                    winners, winner_stride);
  }
#endif
  if (args.format == DType::kInt8) {
    return maxsim_with<Int8Dot>(args, document_begin, document_end, query_begin, query_end, scores, score_stride,
                                winners, winner_stride);
  }
  maxsim_with<Float32Dot>(args, document_begin, document_end, query_begin, query_end, scores, score_stride, winners,
                          winner_stride);
}
