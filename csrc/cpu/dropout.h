// Dropout (Srivastava et al. 2014) of the rows of a matrix: x * keep / (1 - p), by the mask of include/dropout.h.
#pragma once

#include <cstdint>

#include "../include/bf16.h"
#include "../include/dropout.h"

namespace fastbert {

template <typename T>
struct DropoutArgs {
  const T* x;  // (rows, width), contiguous; out likewise
  Dropout dropout;
  int64_t width;
  T* out;
};

// Rows [begin, end).
template <typename T>
void dropout_rows(const DropoutArgs<T>& args, int64_t begin, int64_t end);

}  // namespace fastbert
