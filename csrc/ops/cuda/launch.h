// What every operator of the CUDA backend does to launch its kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "../../cuda/dropout.h"
#include "../../cuda/runtime.h"
#include "../tensors.h"

namespace fastbert {

inline DType storage_of(at::ScalarType dtype) {
  if (dtype == at::kFloat) return DType::kFloat;
  if (dtype == at::kBFloat16) return DType::kBFloat16;
  TORCH_CHECK(dtype == at::kHalf, "dtype is ", dtype, ", expected Float, BFloat16 or Half");
  return DType::kHalf;
}

inline void check_row_width(int64_t width) {
  TORCH_CHECK(width <= kMaxRowWidth, "rows have ", width, " columns, the kernels take up to ", kMaxRowWidth);
}

// `philox` keeps the pointer alive.
inline DropoutMask make_dropout_mask(double p, const std::optional<at::Tensor>& philox_, at::Device device,
                                     at::Tensor& philox) {
  TORCH_CHECK(p >= 0.0 && p <= 1.0, "dropout_p is ", p, ", expected a value from 0 to 1");
  if (p == 0.0) return {};
  TORCH_CHECK(philox_.has_value(), "dropout_p is ", p, " but philox, its seed and offset, is None");
  philox = checked("philox", *philox_, {2}, at::kLong, device);
  return dropout_mask(p, data<const int64_t>(philox));
}

// launcher(args, stream) on the device and the current stream of `t`.
template <typename Args>
void launch_for(const at::Tensor& t, cudaError_t (*launcher)(const Args&, cudaStream_t), const Args& args) {
  const c10::DeviceGuard guard(t.device());
  C10_CUDA_CHECK(launcher(args, c10::cuda::getCurrentCUDAStream(t.device().index()).stream()));
}

// `t` where it was asked for, null else: results have a tensor of no rows then.
template <typename T = void>
T* data_if(bool asked, const at::Tensor& t) {
  return asked ? data<T>(t) : nullptr;
}

}  // namespace fastbert
