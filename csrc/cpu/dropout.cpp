#include "dropout.h"

#include <algorithm>

#include "../include/isa.h"

namespace fastbert {
namespace {

template <typename T>
FASTBERT_INLINE void dropout_rows_body(const DropoutArgs<T>& args, int64_t begin, int64_t end) {
  constexpr int64_t kChunk = 256;  // columns, a multiple of Philox's four
  float multiplier[kChunk];
  const auto counters = static_cast<uint64_t>((args.width + 3) / 4);
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t first = 0; first < args.width; first += kChunk) {
      const int64_t n = std::min(kChunk, args.width - first);
      fill_dropout_from(args.dropout, static_cast<uint64_t>(r) * counters + static_cast<uint64_t>(first / 4), n,
                        multiplier);
      const T* x = args.x + r * args.width + first;
      T* out = args.out + r * args.width + first;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        out[i] = from_float<T>(multiplier[i] == 0.0f ? 0.0f : to_float(x[i]) * multiplier[i]);
      }
    }
  }
}

}  // namespace

FASTBERT_DISPATCH(dropout_rows, (const DropoutArgs<T>& args, int64_t begin, int64_t end), (args, begin, end))

template void dropout_rows(const DropoutArgs<float>&, int64_t, int64_t);
template void dropout_rows(const DropoutArgs<BFloat16>&, int64_t, int64_t);

}  // namespace fastbert
