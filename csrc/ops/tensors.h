// What every operator does with its tensors: checks, and storage types.
#pragma once

#include "../include/bf16.h"
#include "array.h"

namespace fastbert {

inline void check_tensor(const char* name, const Array& t, const Shape& shape, ScalarType dtype, Device device) {
  const Device actual = t.device();
  check(actual.type == device.type && (device.index < 0 || actual.index == device.index), name, " is on ", actual,
        ", expected ", device);
  check(t.sizes() == shape, name, " has shape ", t.sizes(), ", expected ", shape);
  check(t.scalar_type() == dtype, name, " is ", t.scalar_type(), ", expected ", dtype);
}

// An operand, whole in memory.
inline Array checked(const char* name, const Array& t, const Shape& shape, ScalarType dtype, Device device) {
  check_tensor(name, t, shape, dtype, device);
  return contiguous(t);
}
inline Array checked(const char* name, const Array& t, const Shape& shape, ScalarType dtype) {
  return checked(name, t, shape, dtype, cpu());
}

// The same without a copy of its fields: t itself, or `copy` where it has gaps.
inline const Array& checked(const char* name, const Array& t, const Shape& shape, ScalarType dtype, Array& copy) {
  check_tensor(name, t, shape, dtype, cpu());
  return t.is_contiguous() ? t : (copy = contiguous(t));
}

// One that may be absent, which is then undefined.
inline Array checked_if_defined(const char* name, const Array& t, const Shape& shape, ScalarType dtype, Device device) {
  return t.defined() ? checked(name, t, shape, dtype, device) : t;
}

// Throws what Python raises as an IndexError.
template <typename... Message>
void check_index(bool holds, const Message&... message) {
  if (holds) return;
  std::ostringstream text;
  (text << ... << message);
  throw std::out_of_range(text.str());
}

// f is called with a value of the storage type that stands for dtype.
template <typename F>
void for_dtype(ScalarType dtype, const F& f) {
  if (dtype == ScalarType::Float) return f(float{});
  if (dtype == ScalarType::BFloat16) return f(BFloat16{});
  fail("dtype is ", dtype, ", expected Float or BFloat16");
}

}  // namespace fastbert
