#include "column_sums.h"

#include <algorithm>

#include "chunk.h"

namespace fastbert {
namespace {

constexpr int kColumns = 32, kMaxWalkers = 16;  // of a block: shares are many and columns few

template <typename T>
__global__ void __launch_bounds__(kColumns* kMaxWalkers) column_sums_kernel(ColumnSumsArgs a) {
  const int which = static_cast<int>(blockIdx.y);
  // Not a.out[which]: arguments are not in memory that takes an index.
  T* const out = static_cast<T*>(which == 0 ? a.out[0] : which == 1 ? a.out[1] : a.out[2]);
  if (out == nullptr) return;
  const int64_t column = int64_t{blockIdx.x} * kColumns + threadIdx.x;
  const int walkers = static_cast<int>(blockDim.y);
  const int64_t step = a.vectors * a.columns;
  const float* from = a.shares + which * a.columns + column;
  float sum = 0.0f;
  if (column < a.columns) {
#pragma unroll 4
    for (int64_t share = threadIdx.y; share < a.num_shares; share += walkers) sum += from[share * step];
  }
  shared[threadIdx.y * kColumns + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= a.columns) return;
  for (int walker = 1; walker < walkers; ++walker) sum += shared[walker * kColumns + threadIdx.x];
  out[column] = from_float<T>(sum);
}

struct Launch {
  const ColumnSumsArgs& args;
  cudaStream_t stream;

  template <typename T>
  cudaError_t run() const {
    const dim3 grid(ceil_div(args.columns, kColumns), static_cast<unsigned>(args.vectors));
    const int64_t walkers = std::max<int64_t>(1, std::min<int64_t>(kMaxWalkers, args.num_shares));
    const dim3 block(kColumns, static_cast<unsigned>(walkers));
    return launch(column_sums_kernel<T>, grid, block, block.x * block.y, args, stream);
  }
};

}  // namespace

cudaError_t launch_column_sums(const ColumnSumsArgs& args, cudaStream_t stream) {
  if (args.columns == 0) return cudaSuccess;
  return for_dtype(args.dtype, Launch{args, stream});
}

}  // namespace fastbert
