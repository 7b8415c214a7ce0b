// What csrc/cuda and csrc/ops/cuda lack to be a library that Python loads: the emulation's shared memory, what it says
// to AddressSanitizer, which is not in that process, and those of libtorch's functions that only a torch with CUDA has.
// The emulation has one stream, which runs a kernel when it is launched, and products are the CPU's own.
// tests/gpu/test_cuda.py runs the kernels under AddressSanitizer.

#include "../../csrc/cuda/runtime.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/c/shim.h>

alignas(16) float fastbert::shared[cuda_emulation::kSharedBytes / sizeof(float)];

extern "C" {
void __asan_poison_memory_region(void const volatile*, size_t) {}
void __asan_unpoison_memory_region(void const volatile*, size_t) {}
void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}

AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return 0;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 0; }
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
AOTITorchError torch_c10_cuda_check_msg(int32_t error, const char*, const char*, uint32_t, bool, char** message) {
  *message = nullptr;
  return error;
}
void torch_c10_cuda_free_error_msg(char*) {}
AOTITorchError aoti_torch_cuda_mm_out(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b) {
  return aoti_torch_cpu_mm_out(out, a, b);
}
AOTITorchError aoti_torch_cuda_addmm_out(AtenTensorHandle out, AtenTensorHandle bias, AtenTensorHandle a,
                                         AtenTensorHandle b, double beta, double alpha) {
  return aoti_torch_cpu_addmm_out(out, bias, a, b, beta, alpha);
}
}
