// What every operator of the CUDA backend does to launch its kernel.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "../../cuda/dropout.h"
#include "../../cuda/runtime.h"
#include "../tensors.h"

namespace fastbert {

inline DType storage_of(ScalarType dtype) {
  if (dtype == ScalarType::Float) return DType::kFloat;
  if (dtype == ScalarType::BFloat16) return DType::kBFloat16;
  check(dtype == ScalarType::Half, "dtype is ", dtype, ", expected Float, BFloat16 or Half");
  return DType::kHalf;
}

inline void check_row_width(int64_t width) {
  check(width <= kMaxRowWidth, "rows have ", width, " columns, the kernels take up to ", kMaxRowWidth);
}

// `philox` keeps the pointer alive.
inline DropoutMask make_dropout_mask(double p, const OptionalArray& philox_, Device device, Array& philox) {
  check(p >= 0.0 && p <= 1.0, "dropout_p is ", p, ", expected a value from 0 to 1");
  if (p == 0.0) return {};
  check(philox_.defined(), "dropout_p is ", p, " but philox, its seed and offset, is None");
  philox = checked("philox", philox_, {2}, ScalarType::Long, device);
  return dropout_mask(p, philox.data<const int64_t>());
}

// launcher(args, stream) on the device and the current stream of `t`.
template <typename Args>
void launch_for(const Array& t, cudaError_t (*launcher)(const Args&, cudaStream_t), const Args& args) {
  const torch::stable::accelerator::DeviceGuard guard(t.device().index);
  void* stream = nullptr;
  call(aoti_torch_get_current_cuda_stream(t.device().index, &stream), "the current stream");
  STD_CUDA_CHECK(launcher(args, static_cast<cudaStream_t>(stream)));
}

// `t` where it was asked for, null else: results have a tensor of no rows then.
template <typename T = void>
T* data_if(bool asked, const Array& t) {
  return asked ? t.data<T>() : nullptr;
}

}  // namespace fastbert
