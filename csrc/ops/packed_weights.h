// Weights packed for the GEMMs, kept for as long as the weight itself lives unchanged.
#pragma once

#include <ATen/core/Tensor.h>

#include "../cpu/gemm.h"

namespace fastbert {

DType dtype_of(const at::Tensor& t);

// A packed weight and the memory behind it.
struct PackedTensor {
  at::Tensor panels;           // bytes
  at::Tensor channel_offsets;  // int32, int8 weights only
};

// weight (out_features, in_features) packed in `format`; `weight.t()` serves the gradient's product. Packs where there
// is no packed copy yet, or where the weight has changed since: its version counter has moved, or one of 16 sampled
// elements (writes through `.data` move no counter) is another. Several threads may ask at once.
PackedTensor packed_weight(const at::Tensor& weight, DType format);

// Bytes in use by the packed copies of weights that are alive.
int64_t packed_bytes();

}  // namespace fastbert
