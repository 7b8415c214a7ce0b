// Kernels with one fault each, and what the emulation makes of them: `cuda_faults FAULT up|down`.

#include <cstdio>
#include <string>
#include <vector>

#include "../../csrc/cuda/runtime.h"

alignas(16) float fastbert::shared[cuda_emulation::kSharedBytes / sizeof(float)];

namespace {

using fastbert::shared;

struct Args {
  float* to;  // 64 floats
};

int thread() { return static_cast<int>(threadIdx.x); }

__global__ void none(Args a) {
  shared[thread()] = static_cast<float>(thread());
  __syncthreads();
  a.to[thread()] = __shfl_xor_sync(0xffffffffu, shared[63 - thread()], 1);
}
__global__ void writes_beyond_a_buffer(Args a) { a.to[thread() + 1] = 0.0f; }
__global__ void reads_beyond_shared_memory(Args a) { a.to[thread()] = shared[thread() + 1]; }
__global__ void loads_16_bytes_from_4(Args a) {
  const uint4 bits = *reinterpret_cast<const uint4*>(a.to + 1);
  a.to[thread()] = static_cast<float>(bits.x);
}
__global__ void skips_a_barrier(Args) {
  if (thread() < 32) __syncthreads();
}
__global__ void leaves_before_a_barrier(Args) {
  if (thread() == 7) return;
  __syncthreads();
}
__global__ void skips_a_shuffle(Args a) {
  if (thread() % 2 == 0) a.to[thread()] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}
__global__ void mixes_shuffles(Args a) { a.to[thread()] = __shfl_xor_sync(0xffffffffu, 1.0f, 1u + thread() % 2); }
__global__ void reads_unset_shared_memory(Args a) { a.to[thread()] = shared[thread()]; }
__global__ void lacks_a_barrier(Args a) {
  shared[thread()] = static_cast<float>(thread());
  a.to[thread()] = thread() < 32 ? 0.0f : shared[thread() - 32];
}
__global__ void writes_what_others_still_read(Args a) {
  for (int turn = 0; turn < 2; ++turn) {
    shared[thread()] = static_cast<float>(64 * turn + thread());
    __syncthreads();
    a.to[thread()] = turn == 0 ? shared[63 - thread()] : a.to[thread()];
  }
}

}  // namespace

int main(int, char** argv) {
  const std::string fault = argv[1];
  cuda_emulation::descending = std::string(argv[2]) == "down";
  std::vector<float> to(64, 0.0f);
  to.shrink_to_fit();
  void (*const kernel)(Args) = fault == "writes_beyond_a_buffer"          ? writes_beyond_a_buffer
                               : fault == "reads_beyond_shared_memory"    ? reads_beyond_shared_memory
                               : fault == "loads_16_bytes_from_4"         ? loads_16_bytes_from_4
                               : fault == "skips_a_barrier"               ? skips_a_barrier
                               : fault == "leaves_before_a_barrier"       ? leaves_before_a_barrier
                               : fault == "skips_a_shuffle"               ? skips_a_shuffle
                               : fault == "mixes_shuffles"                ? mixes_shuffles
                               : fault == "reads_unset_shared_memory"     ? reads_unset_shared_memory
                               : fault == "lacks_a_barrier"               ? lacks_a_barrier
                               : fault == "writes_what_others_still_read" ? writes_what_others_still_read
                                                                          : none;
  fastbert::launch(kernel, dim3(1), dim3(64), 64, Args{to.data()}, cudaStream_t{});
  for (const float value : to) printf("%g ", value);
}
