#include "embedding.h"

#include <algorithm>
#include <atomic>

namespace fastbert {
namespace {

constexpr int64_t kChunk = 256;  // columns whose sums stay in registers or the first-level cache

template <typename T>
FASTBERT_INLINE void embed_fwd_body(const EmbedFwd<T>& args, int64_t begin, int64_t end) {
  float sum[kChunk];
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t first = 0; first < args.width; first += kChunk) {
      const int64_t n = std::min(kChunk, args.width - first);
      for (int64_t i = 0; i < n; ++i) sum[i] = 0.0f;
      for (int64_t t = 0; t < kTables; ++t) {
        if (args.table[t] == nullptr) continue;
        const int64_t id = args.ids[t] == nullptr ? r * args.row_step[t] : args.ids[t][r];
        const T* row = args.table[t] + id * args.width + first;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) sum[i] += to_float(row[i]);
      }
      T* out = args.out + r * args.width + first;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) out[i] = from_float<T>(sum[i]);
    }
  }
}

template <typename T>
FASTBERT_INLINE void embed_bwd_body(const EmbedBwd<T>& args, int64_t begin, int64_t end) {
  float sum[kChunk], part[kChunk];
  for (int64_t first = begin; first < end; first += kChunk) {
    const int64_t n = std::min(kChunk, end - first);
    for (int64_t i = 0; i < args.tokens;) {
      const int64_t id = args.ids[args.order[i]];
      for (int64_t c = 0; c < n; ++c) sum[c] = 0.0f;
      // Type 0 may have every token of the batch: no chain is longer than 128 additions.
      while (i < args.tokens && args.ids[args.order[i]] == id) {
        for (int64_t c = 0; c < n; ++c) part[c] = 0.0f;
        for (int64_t stop = i + 128; i < std::min(args.tokens, stop) && args.ids[args.order[i]] == id; ++i) {
          const T* row = args.dout + args.order[i] * args.width + first;
#pragma omp simd
          for (int64_t c = 0; c < n; ++c) part[c] += to_float(row[c]);
        }
#pragma omp simd
        for (int64_t c = 0; c < n; ++c) sum[c] += part[c];
      }
      if (id == args.padding_idx) continue;
      T* out = args.dtable + id * args.width + first;
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) out[c] = from_float<T>(sum[c]);
    }
  }
}

}  // namespace

FASTBERT_DISPATCH(embed_fwd, (const EmbedFwd<T>& args, int64_t begin, int64_t end), (args, begin, end))
FASTBERT_DISPATCH(embed_bwd, (const EmbedBwd<T>& args, int64_t begin, int64_t end), (args, begin, end))

template void embed_fwd(const EmbedFwd<float>&, int64_t, int64_t);
template void embed_fwd(const EmbedFwd<BFloat16>&, int64_t, int64_t);
template void embed_bwd(const EmbedBwd<float>&, int64_t, int64_t);
template void embed_bwd(const EmbedBwd<BFloat16>&, int64_t, int64_t);

}  // namespace fastbert
