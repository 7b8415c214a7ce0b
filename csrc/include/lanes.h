// Sums over a row in 32 interleaved lanes. They keep two to eight vector registers busy at once, so that an addition
// need not wait for the one before; no lane of a row adds up more than 1/32 of it, so rounding errors stay small; and
// the order of additions is the same on every ISA.
#pragma once

#include <cstdint>

#include "isa.h"

namespace fastbert {

constexpr int64_t kLanes = 32;

struct LaneSum {
  float lane[kLanes] = {};

  FASTBERT_INLINE float total() {
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
      for (int64_t l = 0; l < width; ++l) lane[l] += lane[l + width];
    }
    return lane[0];
  }
};

// f(column, lane) for the columns of a row; f must be forced inline.
template <typename F>
FASTBERT_INLINE void for_each_in_lanes(int64_t n, const F& f) {
  int64_t column = 0;
  for (; column + kLanes <= n; column += kLanes) {
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; ++lane) f(column + lane, lane);
  }
  for (int64_t lane = 0; column + lane < n; ++lane) f(column + lane, lane);
}

}  // namespace fastbert
