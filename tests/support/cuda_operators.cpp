// What csrc/cuda and csrc/ops/cuda lack to be a library that Python loads: the emulation's shared memory, and what it
// says to AddressSanitizer, which is not in that process. tests/gpu/test_cuda.py runs the kernels under it.

#include "../../csrc/cuda/runtime.h"

alignas(16) float fastbert::shared[cuda_emulation::kSharedBytes / sizeof(float)];

extern "C" {
void __asan_poison_memory_region(void const volatile*, size_t) {}
void __asan_unpoison_memory_region(void const volatile*, size_t) {}
void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
}
