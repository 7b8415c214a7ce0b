// In place of torch's header of this name: see CUDAStream.h.
#pragma once

#include <c10/util/Exception.h>

#define C10_CUDA_CHECK(expression) TORCH_CHECK((expression) == cudaSuccess, "a kernel was not launched")
