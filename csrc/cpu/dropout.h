// Dropout (Srivastava et al. 2014) of the rows of a matrix: x * keep / (1 - p), by the mask of include/dropout.h.
#pragma once

#include <cstdint>

#include "../include/bf16.h"
#include "../include/dropout.h"

namespace fastbert {

// multipliers[i] is 0 where column i of row `row` of a matrix of `width` columns is dropped, and 1 / (1 - p) where it
// is kept. `multipliers` has room for room_for_multipliers(width).
void draw_multipliers(const Dropout& dropout, int64_t row, int64_t width, float* multipliers);
inline int64_t room_for_multipliers(int64_t width) { return (width + 31) / 32 * 32; }

template <typename T>
struct DropoutArgs {
  const T* x;  // (rows, width), contiguous; out likewise
  Dropout dropout;
  int64_t width;
  T* out;
};

// Rows [begin, end).
void dropout_rows(const DropoutArgs<float>& args, int64_t begin, int64_t end);
void dropout_rows(const DropoutArgs<BFloat16>& args, int64_t begin, int64_t end);

}  // namespace fastbert
