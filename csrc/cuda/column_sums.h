// The second half of sums over rows: shares that blocks left in fp32, added up in a fixed order, without atomics.
#pragma once

#include "runtime.h"

namespace fastbert {

struct ColumnSumsArgs {
  DType dtype;          // of out
  const float* shares;  // (num_shares, vectors, columns)
  int64_t num_shares;
  int vectors;  // 1 to 3; those beyond are left alone
  int64_t columns;
  void* out[3];  // (columns,) each, or null, which leaves that vector out
};

cudaError_t launch_column_sums(const ColumnSumsArgs& args, cudaStream_t stream);

}  // namespace fastbert
