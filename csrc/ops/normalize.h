// The registered normalize operator of the CPU backend; fastbert/ops/normalize.py has its schema.
#pragma once

#include "array.h"

namespace fastbert {

// x (rows, width), float32 or bfloat16 -> float32 rows of length 1; what is shorter than eps is divided by eps.
Array normalize_cpu(const Array& x, double eps);

}  // namespace fastbert
