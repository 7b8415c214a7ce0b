#include "gemm.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <optional>
#include <type_traits>
#include <vector>

#include "../include/scratch.h"

#define FASTBERT_BODY "../cpu/gemm_body.h"
#define FASTBERT_USES_VNNI
#define FASTBERT_USES_AMX
#include "../include/foreach_isa.h"

namespace fastbert::generic {

// A tile's sums as finish_tile reads them: integers of int8 operands.
template <typename T>
void copy_sums(const T* sums, int64_t stride, const Tile& tile, int64_t columns, bool are_integers, char* out) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    const T* from = sums + (tile.row + r) * stride + tile.column;
    char* to = out + r * kStepBytes;
    std::memset(to, 0, kStepBytes);
    if (are_integers) {
      for (int64_t c = 0; c < columns; ++c) reinterpret_cast<int32_t*>(to)[c] = static_cast<int32_t>(to_float(from[c]));
    } else {
      for (int64_t c = 0; c < columns; ++c) reinterpret_cast<float*>(to)[c] = to_float(from[c]);
    }
  }
}

// One target, or one of a gated pair.
struct Finished {
  GemmTarget target;
  RowsArg sums;
  Channels channels;
  Pair pair;
  std::vector<float> channels_memory;
  std::vector<int32_t> no_offset;  // int8 rows had none

  Finished(const GemmTarget& target_, const RowsArg& sums_, Pair pair_) : target{target_}, sums{sums_}, pair{pair_} {
    const int64_t panels = num_panels(target.weight.out_features);
    channels = channels_of(target, 0, panels, channels_memory);
    if (target.weight.format != DType::kInt8) return;
    no_offset.assign(static_cast<size_t>(panels * kPanel), 0);
    target.weight.channel_offset = no_offset.data();
  }

  template <typename T>
  void finish(Tile tile, char* memory) const {
    const bool is_int8 = target.weight.format == DType::kInt8;
    const int64_t columns = std::min(kPanel, target.weight.out_features - tile.column);
    if (sums.dtype == DType::kFloat32) {
      copy_sums(static_cast<const float*>(sums.data), sums.stride, tile, columns, is_int8, memory);
    } else {
      copy_sums(static_cast<const BFloat16*>(sums.data), sums.stride, tile, columns, is_int8, memory);
    }
    tile.sums = memory;
    if (!is_int8) return finish_tile<T, false>(target, channels, tile, pair);
    tile.row_scale = sums.scales + tile.row;
    finish_tile<T, true>(target, channels, tile, pair);
  }
};

template <typename T>
void finish_sums_typed(const FinishArgs& args, int64_t row_begin, int64_t row_end) {
  const GemmTarget* const gate = args.target.gate;
  const Finished whole(args.target, args.sums, gate == nullptr ? Pair::kNone : Pair::kUp);
  std::optional<const Finished> of_gate;
  if (gate != nullptr) of_gate.emplace(*gate, args.gate_sums, Pair::kGate);
  alignas(64) char sums[kAmxRows * kStepBytes];
  alignas(64) float gated[kAmxRows * kPanel];
  for (int64_t row = row_begin; row < row_end; row += kAmxRows) {
    for (int64_t column = 0; column < args.target.weight.out_features; column += kPanel) {
      const Tile tile{row, std::min(kAmxRows, row_end - row), column, nullptr, nullptr, gated};
      if (of_gate.has_value()) of_gate->template finish<T>(tile, sums);
      whole.template finish<T>(tile, sums);
    }
  }
}

}  // namespace fastbert::generic

namespace fastbert {

void finish_sums(const FinishArgs& args, int64_t row_begin, int64_t row_end) {
  args.out_dtype == DType::kFloat32 ? generic::finish_sums_typed<float>(args, row_begin, row_end)
                                    : generic::finish_sums_typed<BFloat16>(args, row_begin, row_end);
}

bool has_products() { return current_isa().load(std::memory_order_relaxed) != Isa::kGeneric; }

bool has_bf16_dot() { return current_isa().load(std::memory_order_relaxed) >= Isa::kAvx512Bf16; }

int64_t row_group() { return current_isa().load(std::memory_order_relaxed) == Isa::kAmx ? 32 : 1; }

void pack_panels(const PackArgs& args, int64_t begin, int64_t end) { FASTBERT_RUN(pack_panels, args, begin, end); }

void panel_sums(const char* panel, DType format, int64_t in_features, void* out, DType out_dtype, int64_t columns) {
  FASTBERT_RUN(panel_sums, panel, format, in_features, out, out_dtype, columns);
}

void convert_rows(const RowsArg& x, int64_t begin, int64_t end, const PackedWeight& weight, char* out, float* scales) {
  FASTBERT_RUN(convert_rows, x, begin, end, weight, out, scales);
}

void gemm(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  FASTBERT_RUN(gemm, args, row_begin, row_end, panel_begin, panel_end);
}

void gemm_transposed(const GemmTransposedArgs& args, int64_t begin, int64_t end) {
  FASTBERT_RUN(gemm_transposed, args, begin, end);
}

void column_sums(const RowsArg& x, int64_t rows, void* out, DType out_dtype, int64_t begin, int64_t end) {
  FASTBERT_RUN(column_sums, x, rows, out, out_dtype, begin, end);
}

void activation_bwd(const ActivationBwd& args, int64_t begin, int64_t end) {
  FASTBERT_RUN(activation_bwd, args, begin, end);
}

}  // namespace fastbert
