// The registered dropout operator of the CPU backend (fastbert/ops/dropout.py has its schema), and the dropout
// arguments of every operator: a probability, and philox, the int64 tensor [seed, offset].
#pragma once

#include "../include/dropout.h"
#include "tensors.h"

namespace fastbert {

inline Dropout make_dropout(double p, const std::optional<at::Tensor>& philox) {
  TORCH_CHECK(p >= 0.0 && p <= 1.0, "dropout_p is ", p, ", expected a value from 0 to 1");
  if (p == 0.0) return {0.0, 0, 0};
  TORCH_CHECK(philox.has_value(), "dropout_p is ", p, " but philox, its seed and offset, is None");
  const at::Tensor words = checked("philox", *philox, {2}, at::kLong);
  const auto* seed_and_offset = words.const_data_ptr<int64_t>();
  return {p, static_cast<uint64_t>(seed_and_offset[0]), static_cast<uint64_t>(seed_and_offset[1])};
}

at::Tensor dropout_cpu(const at::Tensor& x, const at::Tensor& philox, double dropout_p);

}  // namespace fastbert
