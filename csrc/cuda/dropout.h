// Dropout as kernels take it; the mask is that of csrc/include/dropout.h.
#pragma once

#include "../include/dropout_numbers.h"
#include "runtime.h"

namespace fastbert {

struct DropoutMask {
  const int64_t* philox = nullptr;  // [seed, offset] on the device, where kernels read them; null turns dropout off
  uint32_t threshold = 0;
  float scale = 1.0f;
};

inline DropoutMask dropout_mask(double p, const int64_t* philox) {
  if (p == 0.0) return {};
  return {philox, dropout_threshold(p), dropout_scale(p)};
}

}  // namespace fastbert
