#include "layer_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "../include/lanes.h"
#include "dropout.h"

namespace fastbert {
namespace {

// The weight plus its offset. An absent one becomes ones, so that the row loops know only one case; bf16 is widened
// once, not once a row.
template <typename T>
std::vector<float> weight_of(const AddLayerNormBwd<T>& args) {
  const int64_t n = args.hidden_size;
  std::vector<float> out(static_cast<size_t>(n), 1.0f);
  if (args.weight != nullptr) {
    for (int64_t i = 0; i < n; ++i) out[static_cast<size_t>(i)] = to_float(args.weight[i]) + args.weight_offset;
  }
  return out;
}

template <typename T, bool kHasMore, bool kHasDsum, bool kHasDropout>
FASTBERT_INLINE void bwd_chunks(const AddLayerNormBwd<T>& args, int64_t begin, int64_t end) {
  const int64_t n = args.hidden_size;
  const float inverse_n = 1.0f / static_cast<float>(n);
  const bool is_rms = args.mean == nullptr;
  const std::vector<float> weight_floats = weight_of(args);
  const float* weight = weight_floats.data();
  std::vector<float> multiplier_floats(static_cast<size_t>(kHasDropout ? room_for_multipliers(n) : 0));
  float* multiplier = multiplier_floats.data();

  for (int64_t chunk = begin; chunk < end; ++chunk) {
    float* dweight = args.partial + chunk * 3 * n;
    float* dbias = dweight + n;
    float* dx_bias = dbias + n;
    for (int64_t i = 0; i < 3 * n; ++i) dweight[i] = 0.0f;

    const int64_t first = chunk * args.rows_per_chunk;
    const int64_t last = std::min(first + args.rows_per_chunk, args.rows);
    for (int64_t r = first; r < last; ++r) {
      const T* dout = args.dout + r * n;
      const T* more = kHasMore ? args.dout_more + r * n : nullptr;
      const auto dy_at = [&](int64_t i) FASTBERT_INLINE_LAMBDA {
        // Rounded as a tensor of the sum would be.
        if constexpr (kHasMore) return to_float(from_float<T>(to_float(dout[i]) + to_float(more[i])));
        return to_float(dout[i]);
      };
      const T* dsum = kHasDsum ? args.dsum + r * n : nullptr;
      const T* summed = args.summed + r * n;
      T* dx = kHasDropout ? args.dx + r * n : nullptr;
      T* dsummed = args.dsummed + r * n;
      const float mean = is_rms ? 0.0f : args.mean[r], rstd = args.rstd[r];
      if constexpr (kHasDropout) draw_multipliers(args.dropout, r, n, multiplier);

      LaneSum xhat_sum, ones_sum;
      for_each_in_lanes(n, [&](int64_t i, int64_t lane) FASTBERT_INLINE_LAMBDA {
        const float dy = dy_at(i);
        const float xhat = (to_float(summed[i]) - mean) * rstd;
        const float dxhat = dy * weight[i];
        xhat_sum.lane[lane] += dxhat * xhat;
        ones_sum.lane[lane] += dxhat;
        dweight[i] += dy * xhat;
        dbias[i] += dy;
      });
      const float along_xhat = xhat_sum.total() * inverse_n;
      const float along_ones = is_rms ? 0.0f : ones_sum.total() * inverse_n;

#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        const float xhat = (to_float(summed[i]) - mean) * rstd;
        float gradient = (dy_at(i) * weight[i] - along_ones - xhat * along_xhat) * rstd;
        if constexpr (kHasDsum) gradient += to_float(dsum[i]);
        dsummed[i] = from_float<T>(gradient);
        if constexpr (kHasDropout) {
          gradient *= multiplier[i];
          dx[i] = from_float<T>(gradient);
        }
        dx_bias[i] += gradient;
      }
    }
  }
}

template <typename T, bool kHasMore>
FASTBERT_INLINE void bwd_chunks_of(const AddLayerNormBwd<T>& args, int64_t begin, int64_t end) {
  const bool has_dsum = args.dsum != nullptr, has_dropout = args.dropout.p > 0.0;
  if (has_dsum && has_dropout) return bwd_chunks<T, kHasMore, true, true>(args, begin, end);
  if (has_dsum) return bwd_chunks<T, kHasMore, true, false>(args, begin, end);
  if (has_dropout) return bwd_chunks<T, kHasMore, false, true>(args, begin, end);
  bwd_chunks<T, kHasMore, false, false>(args, begin, end);
}

template <typename T>
FASTBERT_INLINE void add_layer_norm_bwd_body(const AddLayerNormBwd<T>& args, int64_t begin, int64_t end) {
  args.dout_more != nullptr ? bwd_chunks_of<T, true>(args, begin, end) : bwd_chunks_of<T, false>(args, begin, end);
}

template <typename T>
FASTBERT_INLINE void add_column_sums_body(const ColumnSums<T>& args, int64_t begin, int64_t end) {
  std::vector<float> total_floats(static_cast<size_t>(end - begin));
  float* total = total_floats.data();
  for (int64_t which = 0; which < 3; ++which) {
    T* out = args.out[which];
    if (out == nullptr) continue;
    for (int64_t i = 0; i < end - begin; ++i) total[i] = 0.0f;
    for (int64_t chunk = 0; chunk < args.chunks; ++chunk) {
      const float* share = args.partial + (chunk * 3 + which) * args.hidden_size + begin;
#pragma omp simd
      for (int64_t i = 0; i < end - begin; ++i) total[i] += share[i];
    }
    for (int64_t i = 0; i < end - begin; ++i) out[begin + i] = from_float<T>(total[i]);
  }
}

}  // namespace

FASTBERT_DISPATCH(add_layer_norm_bwd, (const AddLayerNormBwd<T>& args, int64_t begin, int64_t end), (args, begin, end))
FASTBERT_DISPATCH(add_column_sums, (const ColumnSums<T>& args, int64_t begin, int64_t end), (args, begin, end))

template void add_layer_norm_bwd(const AddLayerNormBwd<float>&, int64_t, int64_t);
template void add_layer_norm_bwd(const AddLayerNormBwd<BFloat16>&, int64_t, int64_t);
template void add_column_sums(const ColumnSums<float>&, int64_t, int64_t);
template void add_column_sums(const ColumnSums<BFloat16>&, int64_t, int64_t);

}  // namespace fastbert
