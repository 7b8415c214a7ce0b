// The registered dropout operator of the CPU backend (fastbert/ops/dropout.py has its schema), and the dropout
// arguments of every operator: a probability, and philox, the int64 tensor [seed, offset].
#pragma once

#include "../include/dropout.h"
#include "tensors.h"

namespace fastbert {

inline Dropout make_dropout(double p, const OptionalArray& philox) {
  check(p >= 0.0 && p <= 1.0, "dropout_p is ", p, ", expected a value from 0 to 1");
  if (p == 0.0) return {0.0, 0, 0};
  check(philox.defined(), "dropout_p is ", p, " but philox, its seed and offset, is None");
  const Array words = checked("philox", philox, {2}, ScalarType::Long);
  const auto* seed_and_offset = words.data<const int64_t>();
  return {p, static_cast<uint64_t>(seed_and_offset[0]), static_cast<uint64_t>(seed_and_offset[1])};
}

Array dropout_cpu(const Array& x, const Array& philox, double dropout_p);

}  // namespace fastbert
