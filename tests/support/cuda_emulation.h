// CUDA as plain C++, as far as csrc/cuda uses it: FASTBERT_CUDA_EMULATION names this file, tests/gpu/test_cuda.py
// builds the kernels with it and runs them under AddressSanitizer. The threads of a block are fibers that switch at
// barriers and shuffles, nowhere else. Warp after warp runs as far as the next barrier, in ascending or in descending
// order: a barrier that is missing shows as two results. What would hang or be undefined on a GPU ends the program.
// Shared memory holds NaN when a block begins.
#pragma once

#include <math.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
// What the device makes of them, but for the last bits of its tables.
inline float __expf(float x) { return exp2f(x * 1.44269504f); }
inline float __fdividef(float x, float y) { return x * (1.0f / y); }

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float out;
  memcpy(&out, &bits, sizeof(out));
  return out;
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (value != value) return {0x7fff};
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

struct __half {
  _Float16 value;
};
inline float __half2float(__half value) { return static_cast<float>(value.value); }
inline __half __float2half_rn(float value) { return {static_cast<_Float16>(value)}; }

namespace fastbert {
extern float shared[];
}

namespace cuda_emulation {

constexpr size_t kSharedBytes = 48 * 1024;  // what a block may have without asking for more
constexpr size_t kStackBytes = 256 * 1024;

enum class State { kReady, kAtShuffle, kAtBarrier, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  dim3 index;
  State state;
  uint32_t sent, received;
  unsigned distance;
};

inline dim3 grid_size, block_size, block_index;
inline std::vector<Fiber> fibers;
inline Fiber* running;
inline ucontext_t scheduler;
inline const void* scheduler_stack;
inline size_t scheduler_stack_bytes;
inline std::function<void()> body;
inline bool descending = false;

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "block (%u, %u): %s\n", block_index.x, block_index.y, what);
  _Exit(3);
}

inline void switch_to_scheduler(State state) {
  running->state = state;
  Fiber* const self = running;
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(state == State::kDone ? nullptr : &fake_stack, scheduler_stack, scheduler_stack_bytes);
  swapcontext(&self->context, &scheduler);
  __sanitizer_finish_switch_fiber(fake_stack, &scheduler_stack, &scheduler_stack_bytes);
}

inline void fiber_main() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
  body();
  switch_to_scheduler(State::kDone);
}

inline void resume(Fiber& fiber) {
  running = &fiber;
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, fiber.stack.get(), kStackBytes);
  swapcontext(&scheduler, &fiber.context);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

// Lets a warp go on that waits at a shuffle, after handing its words over; false where it does not wait at one.
inline bool shuffle(Fiber* warp) {
  int waiting = 0;
  for (int lane = 0; lane < 32; ++lane) waiting += warp[lane].state == State::kAtShuffle;
  if (waiting == 0) return false;
  if (waiting < 32) fail("a shuffle that some lanes of the warp never reach");
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (warp[lane].distance != warp[0].distance) fail("lanes of a warp are at different shuffles");
    warp[lane].received = warp[lane ^ warp[lane].distance].sent;
    warp[lane].state = State::kReady;
  }
  return true;
}

// A warp runs until its threads wait at a barrier or are done, while the others stand still.
inline void run_warp(Fiber* warp) {
  do {
    for (int i = 0; i < 32; ++i) {
      Fiber& fiber = warp[descending ? 31 - i : i];
      if (fiber.state == State::kReady) resume(fiber);
    }
  } while (shuffle(warp));
}

inline void run_block(size_t threads, size_t shared_bytes) {
  __asan_unpoison_memory_region(fastbert::shared, kSharedBytes);
  memset(fastbert::shared, 0xff, kSharedBytes);
  __asan_poison_memory_region(reinterpret_cast<char*>(fastbert::shared) + shared_bytes, kSharedBytes - shared_bytes);
  for (size_t i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.state = State::kReady;
    fiber.index = dim3(i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
  }
  for (;;) {
    for (size_t i = 0; i < threads; i += 32) run_warp(&fibers[descending ? threads - 32 - i : i]);
    size_t at_barrier = 0;
    for (size_t i = 0; i < threads; ++i) at_barrier += fibers[i].state == State::kAtBarrier;
    if (at_barrier == 0) return;
    if (at_barrier < threads) fail("a barrier that some threads never reach");
    for (size_t i = 0; i < threads; ++i) fibers[i].state = State::kReady;
  }
}

inline void run_grid(dim3 grid, dim3 block, size_t shared_bytes) {
  const size_t threads = size_t{block.x} * block.y * block.z;
  grid_size = grid;
  block_size = block;
  block_index = dim3(0, 0);
  if (threads == 0 || threads > 1024 || threads % 32 != 0) fail("a block takes whole warps, at most 1024 threads");
  if (grid.x == 0 || grid.y == 0 || grid.y > 65535 || grid.z != 1) fail("a grid that does not exist");
  if (shared_bytes > kSharedBytes) fail("more shared memory than a block has");
  while (fibers.size() < threads) fibers.emplace_back();
  const size_t blocks = size_t{grid.x} * grid.y;
  for (size_t i = 0; i < blocks; ++i) {
    const size_t b = descending ? blocks - 1 - i : i;
    block_index = dim3(b % grid.x, b / grid.x);
    run_block(threads, shared_bytes);
  }
}

}  // namespace cuda_emulation

#define gridDim (::cuda_emulation::grid_size)
#define blockDim (::cuda_emulation::block_size)
#define blockIdx (::cuda_emulation::block_index)
#define threadIdx (::cuda_emulation::running->index)

inline void __syncthreads() { cuda_emulation::switch_to_scheduler(cuda_emulation::State::kAtBarrier); }

inline float __shfl_xor_sync(unsigned mask, float value, unsigned distance) {
  if (mask != 0xffffffffu || distance > 31) cuda_emulation::fail("a shuffle of other than whole warps");
  cuda_emulation::Fiber& fiber = *cuda_emulation::running;
  memcpy(&fiber.sent, &value, sizeof(value));
  fiber.distance = distance;
  cuda_emulation::switch_to_scheduler(cuda_emulation::State::kAtShuffle);
  memcpy(&value, &fiber.received, sizeof(value));
  return value;
}

template <typename Args>
cudaError_t cudaLaunchKernel(void (*kernel)(Args), dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                             cudaStream_t) {
  const Args args = *static_cast<Args*>(arguments[0]);
  cuda_emulation::body = [&] { kernel(args); };
  cuda_emulation::run_grid(grid, block, shared_bytes);
  return cudaSuccess;
}
