// sum += x, elementwise; bfloat16 is added in fp32 and rounded.
#pragma once

#include <cstdint>

#include "../include/bf16.h"

namespace fastbert {

template <typename T>
void add_to(T* sum, const T* x, int64_t begin, int64_t end);

}  // namespace fastbert
