// What every operator does with its tensors: checks, pointers, storage types.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>

#include "../include/bf16.h"

namespace fastbert {

// `device` without an index means any of its type.
inline at::Tensor checked(const char* name, const at::Tensor& t, at::IntArrayRef shape, at::ScalarType dtype,
                          at::Device device = at::kCPU) {
  TORCH_CHECK(t.device() == device || (!device.has_index() && t.device().type() == device.type()), name, " is on ",
              t.device(), ", expected ", device);
  TORCH_CHECK(t.sizes() == shape, name, " has shape ", t.sizes(), ", expected ", shape);
  TORCH_CHECK(t.scalar_type() == dtype, name, " is ", t.scalar_type(), ", expected ", dtype);
  return t.contiguous();
}

inline at::Tensor checked(const char* name, const std::optional<at::Tensor>& t, at::IntArrayRef shape,
                          at::ScalarType dtype, at::Device device = at::kCPU) {
  return t.has_value() ? checked(name, *t, shape, dtype, device) : at::Tensor();
}

// An undefined tensor, which is how an absent operand or result is passed on, gives null.
template <typename T>
T* data(const at::Tensor& t) {
  return t.defined() ? static_cast<T*>(t.data_ptr()) : nullptr;
}

// f is called with a value of the storage type that stands for dtype.
template <typename F>
void for_dtype(at::ScalarType dtype, const F& f) {
  if (dtype == at::kFloat) return f(float{});
  if (dtype == at::kBFloat16) return f(BFloat16{});
  TORCH_CHECK(false, "dtype is ", dtype, ", expected Float or BFloat16");
}

}  // namespace fastbert
