// In place of torch's header of this name, which a build of torch without CUDA cannot link: the emulation has one
// stream, which runs a kernel when it is launched.
#pragma once

#include <c10/core/Device.h>

namespace c10::cuda {

struct CUDAStream {
  cudaStream_t stream() const { return nullptr; }
};

inline CUDAStream getCurrentCUDAStream(c10::DeviceIndex) { return {}; }

}  // namespace c10::cuda
