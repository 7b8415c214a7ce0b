// Products by torch's own kernels, where none of ours were written for the processor: ARM, and x86 without AVX2. Torch
// calls the libraries that are best there (oneDNN, MKL, Arm's). What stands around a product is ours everywhere.
#pragma once

#include <functional>

#include "../cpu/gemm.h"
#include "array.h"

namespace fastbert {

// run_gemm (products.h) by torch. Of every weight it takes the `source`: nothing is packed, and no copy is kept. int8
// weights and rows become floats.
void multiply_by_torch(const GemmArgs& args, int64_t rows, const std::function<void(int64_t begin, int64_t end)>& done);

// dweight (out_features, in_features) = dout^T x, of rows in any dtypes.
void weight_gradient_by_torch(const Array& dout, const Array& x, const Array& dweight);

}  // namespace fastbert
