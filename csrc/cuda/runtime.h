// What launchers take from CUDA. Where FASTBERT_CUDA_EMULATION names a header, that stands in for CUDA: tests compile
// the kernels as plain C++ and run them without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(FASTBERT_CUDA_EMULATION)
#include FASTBERT_CUDA_EMULATION
#else
#include <cuda_runtime.h>
#endif

namespace fastbert {

// The storage type of matrices and vectors; arithmetic is fp32 in all of them.
enum class DType { kFloat, kBFloat16, kHalf };

// The widest row that kernels keep in registers.
constexpr int64_t kMaxRowWidth = 8192;

// The shared memory of a block; its size is the launch's.
extern __shared__ float shared[];

inline unsigned ceil_div(int64_t n, int64_t by) { return static_cast<unsigned>((n + by - 1) / by); }

// A kernel takes one struct, by value, and `shared_floats` floats of shared memory.
template <typename Args>
cudaError_t launch(void (*kernel)(Args), dim3 grid, dim3 block, size_t shared_floats, Args args, cudaStream_t stream) {
  void* arguments[] = {&args};
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_floats * sizeof(float), stream);
}

}  // namespace fastbert
