// Rows of length 1.
#pragma once

#include <cstdint>

#include "../include/bf16.h"

namespace fastbert {

template <typename T>
struct Normalize {
  const T* x;  // (rows, width)
  int64_t width;
  float eps;  // the least that a row is divided by
  float* out;
};

// Rows [begin, end), each divided by its Euclidean norm, whose squares are summed in double: what order they come in
// is then not to be seen in the result.
template <typename T>
void normalize(const Normalize<T>& args, int64_t begin, int64_t end);

}  // namespace fastbert
