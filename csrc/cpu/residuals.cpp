// Splitting int8 panels (gemm.h), once, as they are packed.
#include <algorithm>
#include <cstring>

#include "../include/isa.h"
#include "gemm.h"

namespace fastbert {
namespace {

constexpr int32_t kLargestPair = 128;

// What two weights have too much: of the first, which has room for it, since the second is no larger than 128.
int32_t residual_of(int32_t first, int32_t second) {
  const int32_t sum = first + second;
  return sum - std::clamp(sum, -kLargestPair, kLargestPair);
}

}  // namespace

bool splits_bytes() {
  const Isa isa = current_isa().load(std::memory_order_relaxed);
  return isa == Isa::kAvx2 || isa == Isa::kAvx512;
}

void count_residuals(const PackArgs& args, int32_t* begin) {
  const auto* weight = static_cast<const int8_t*>(args.weight);
  const int64_t columns = num_panels(args.out_features) * kPanel;
  int32_t count = 0;
  for (int64_t c = 0; c < columns; ++c) {
    begin[c] = count;
    for (int64_t i = 0; c < args.out_features && i < args.in_features; i += 4) {
      int32_t four[4] = {};
      for (int64_t j = 0; j < std::min<int64_t>(4, args.in_features - i); ++j) {
        four[j] = weight[c * args.out_stride + (i + j) * args.in_stride];
      }
      count += (residual_of(four[0], four[1]) | residual_of(four[2], four[3])) != 0;
    }
  }
  begin[columns] = count;
}

void split_panels(char* packed, int64_t steps, int64_t first, int64_t last, const int32_t* begin, Residual* values) {
  for (int64_t p = first; p < last; ++p) {
    auto* panel = reinterpret_cast<int8_t*>(packed + p * steps * kPanel * 4);
    int32_t next[kPanel] = {};
    if (values != nullptr) std::copy_n(begin + p * kPanel, kPanel, next);
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t c = 0; c < kPanel; ++c) {
        int8_t* four = panel + (step * kPanel + c) * 4;
        const int32_t low = residual_of(four[0], four[1]), high = residual_of(four[2], four[3]);
        if ((low | high) == 0) continue;
        four[0] = static_cast<int8_t>(four[0] - low);
        four[2] = static_cast<int8_t>(four[2] - high);
        if (values == nullptr) continue;
        values[next[c]++] = {static_cast<int32_t>(step), {static_cast<int8_t>(low), 0, static_cast<int8_t>(high), 0}};
      }
    }
  }
}

}  // namespace fastbert
