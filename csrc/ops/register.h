// Operators as libtorch's stable ABI calls them: with a stack of 64-bit values, an argument or a result each.
// libtorch's own TORCH_BOX makes tensors of its own of them, and loses the memory of every string.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "array.h"

namespace fastbert {

// An argument. What a schema calls Tensor is an Array, Tensor? an OptionalArray, and a list a std::vector.
template <typename T>
struct Unboxed {
  static T of(StableIValue value) { return torch::stable::detail::to<T>(value); }
};

template <>
struct Unboxed<Array> {
  static Array of(StableIValue value) { return Array(torch::stable::detail::to<AtenTensorHandle>(value)); }
};

template <>
struct Unboxed<OptionalArray> {
  static OptionalArray of(StableIValue value) {
    const auto handle = torch::stable::detail::to<std::optional<AtenTensorHandle>>(value);
    return handle.has_value() ? OptionalArray(Array(*handle)) : OptionalArray();
  }
};

template <>
struct Unboxed<std::string> {
  static std::string of(StableIValue value) {
    const auto handle = torch::stable::detail::to<StringHandle>(value);
    size_t length = 0;
    const char* text = nullptr;
    call(torch_string_length(handle, &length), "a string's length");
    call(torch_string_c_str(handle, &text), "a string");
    std::string copy(text, length);
    call(torch_delete_string(handle), "to delete a string");
    return copy;
  }
};

template <typename T>
struct Unboxed<std::vector<T>> {
  static std::vector<T> of(StableIValue value) {
    const auto list = torch::stable::detail::to<StableListHandle>(value);
    size_t size = 0;
    call(torch_list_size(list, &size), "a list's size");
    std::vector<T> values;
    values.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue item;
      call(torch_list_get_item(list, i, &item), "a list's item");
      values.push_back(Unboxed<T>::of(item));
    }
    call(torch_delete_list(list), "to delete a list");
    return values;
  }
};

// A list of tensors that are Arrays only where they are used, and have one owner: with hundreds of them, an owner
// each would be hundreds of allocations a call. Its elements must not outlive it.
template <typename T>
class List {
 public:
  List() = default;  // an empty one
  explicit List(StableListHandle list) {
    size_t size = 0;
    call(torch_list_size(list, &size), "a list's size");
    handles_.reserve(size);
    for (size_t i = 0; i < size; ++i) {  // all of them: what is not taken is freed nowhere else
      StableIValue item;
      call(torch_list_get_item(list, i, &item), "a list's item");
      if constexpr (std::is_same_v<T, OptionalArray>) {
        handles_.push_back(torch::stable::detail::to<std::optional<AtenTensorHandle>>(item).value_or(nullptr));
      } else {
        handles_.push_back(torch::stable::detail::to<AtenTensorHandle>(item));
      }
    }
    call(torch_delete_list(list), "to delete a list");
  }
  List(List&&) noexcept = default;  // leaves none behind
  List& operator=(List&&) = delete;
  ~List() {
    for (AtenTensorHandle handle : handles_) {
      if (handle != nullptr) aoti_torch_delete_tensor_object(handle);
    }
  }

  // With handles of its own, to be kept beyond the call.
  List copy() const {
    List copied;
    copied.handles_.reserve(handles_.size());
    for (AtenTensorHandle handle : handles_)
      copied.handles_.push_back(handle == nullptr ? nullptr : new_handle(handle));
    return copied;
  }

  size_t size() const { return handles_.size(); }
  T operator[](size_t i) const { return handles_[i] == nullptr ? T() : T(Array::borrowed(handles_[i])); }

 private:
  std::vector<AtenTensorHandle> handles_;
};

template <typename T>
struct Unboxed<List<T>> {
  static List<T> of(StableIValue value) { return List<T>(torch::stable::detail::to<StableListHandle>(value)); }
};

// Results.
template <typename T>
StableIValue boxed(const T& value) {
  return torch::stable::detail::from(value);
}

inline StableIValue boxed(const Array& array) {
  check(array.is_tensor(), "an operator returned no tensor, but a view or memory of its own");
  return torch::stable::detail::from(new_handle(array.handle()));
}

inline StableIValue boxed(const std::vector<Array>& arrays) {
  StableListHandle list = nullptr;
  call(torch_new_list_reserve_size(arrays.size(), &list), "a new list");
  for (const Array& array : arrays) call(torch_list_push_back(list, boxed(array)), "to fill a list");
  return torch::stable::detail::from(list);
}

template <typename T>
void push(StableIValue* stack, const T& result) {
  stack[0] = boxed(result);
}

template <typename... T>
void push(StableIValue* stack, const std::tuple<T...>& results) {
  std::apply(
      [stack](const T&... result) {
        size_t i = 0;
        ((stack[i++] = boxed(result)), ...);
      },
      results);
}

// boxed_operator<&f>: f as the stable ABI calls it.
template <auto f>
struct BoxedOperator;

template <typename Result, typename... Arguments, Result (*f)(Arguments...)>
struct BoxedOperator<f> {
  static void call(StableIValue* stack, uint64_t num_arguments, uint64_t) {
    check(num_arguments == sizeof...(Arguments), "an operator has ", num_arguments, " arguments in its schema, ",
          sizeof...(Arguments), " in C++");
    run(stack, std::index_sequence_for<Arguments...>());
  }

 private:
  template <size_t... i>
  static void run(StableIValue* stack, std::index_sequence<i...>) {
    // Braces take them in order, and all before anything can fail: what is not taken is never freed.
    const std::tuple<std::decay_t<Arguments>...> arguments{Unboxed<std::decay_t<Arguments>>::of(stack[i])...};
    if constexpr (std::is_void_v<Result>) {
      std::apply(f, arguments);
    } else {
      push(stack, std::apply(f, arguments));
    }
  }
};

template <auto f>
constexpr auto boxed_operator = &BoxedOperator<f>::call;

}  // namespace fastbert
