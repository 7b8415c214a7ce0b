#include "array.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

namespace fastbert {
namespace {

// Those that operators take are told apart first: asking libtorch for each in turn takes longer than all the rest.
ScalarType scalar_type_of(int32_t code) {
  static const int32_t float32 = aoti_torch_dtype_float32(), bfloat16 = aoti_torch_dtype_bfloat16(),
                       int8 = aoti_torch_dtype_int8();
  if (code == float32) return ScalarType::Float;
  if (code == bfloat16) return ScalarType::BFloat16;
  if (code == int8) return ScalarType::Char;
  return torch::stable::detail::to<ScalarType>(torch::stable::detail::from(code));
}

Shape contiguous_strides(const Shape& sizes) {
  Shape strides = sizes;
  int64_t stride = 1;
  for (int64_t i = sizes.kept() - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i];
  }
  return strides;
}

std::atomic<bool> is_filling{false};

Array of(const torch::stable::Tensor& tensor) { return Array(new_handle(tensor.get())); }

}  // namespace

AtenTensorHandle new_handle(AtenTensorHandle tensor) {
  AtenTensorHandle handle = nullptr;
  call(aoti_torch_new_tensor_handle(tensor, &handle), "a new handle");
  return handle;
}

std::ostream& operator<<(std::ostream& out, const Device& device) {
  if (device.type == kCpu) return out << "cpu";
  const bool is_cuda = device.type == aoti_torch_device_type_cuda();
  out << (is_cuda ? "cuda" : device.type == aoti_torch_device_type_meta() ? "meta" : "another device");
  return is_cuda && device.index >= 0 ? out << ':' << device.index : out;
}

int64_t element_size(ScalarType dtype) {
  if (dtype == ScalarType::Float) return 4;
  if (dtype == ScalarType::BFloat16) return 2;
  if (dtype == ScalarType::Char || dtype == ScalarType::Byte) return 1;
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  return static_cast<int64_t>(aoti_torch_dtype_element_size(code));
}

std::ostream& operator<<(std::ostream& out, ScalarType dtype) { return out << torch::headeronly::toString(dtype); }

Shape::Shape(std::initializer_list<int64_t> values) : Shape(values.begin(), static_cast<int64_t>(values.size())) {}

Shape::Shape(const int64_t* values, int64_t count) : count_(count) {
  std::copy(values, values + kept(), values_.begin());
}

int64_t Shape::product() const {
  int64_t product = 1;
  for (int64_t i = 0; i < kept(); ++i) product *= (*this)[i];
  return product;
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '[';
  for (int64_t i = 0; i < shape.kept(); ++i) out << (i == 0 ? "" : ", ") << shape[i];
  return out << (shape.count() > shape.kept() ? ", ...]" : "]");
}

Array::Array(AtenTensorHandle tensor)
    : owner_(tensor, [](void* handle) { aoti_torch_delete_tensor_object(static_cast<AtenTensorHandle>(handle)); }),
      handle_(tensor) {
  read_fields();
}

Array Array::borrowed(AtenTensorHandle tensor) {
  Array array;
  array.handle_ = tensor;
  array.read_fields();
  return array;
}

void Array::read_fields() {
  AtenTensorHandle const tensor = handle_;
  defined_ = true;
  int64_t dim = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0;
  const void* data = nullptr;
  call(aoti_torch_get_dim(tensor, &dim), "dim");
  call(aoti_torch_get_sizes(tensor, &sizes), "sizes");
  call(aoti_torch_get_strides(tensor, &strides), "strides");
  call(aoti_torch_get_dtype(tensor, &dtype), "dtype");
  call(aoti_torch_get_device_type(tensor, &device_.type), "device");
  if (!is_cpu()) call(aoti_torch_get_device_index(tensor, &device_.index), "device");
  call(torch_get_const_data_ptr(tensor, &data), "data_ptr");
  sizes_ = Shape(sizes, dim);
  strides_ = Shape(strides, dim);
  dtype_ = scalar_type_of(dtype);
  element_size_ = fastbert::element_size(dtype_);
  data_ = const_cast<void*>(data);
}

Array::Array(std::shared_ptr<void> memory, void* data, const Shape& sizes, ScalarType dtype)
    : owner_(std::move(memory)),
      data_(data),
      sizes_(sizes),
      strides_(contiguous_strides(sizes)),
      element_size_(fastbert::element_size(dtype)),
      dtype_(dtype),
      device_(cpu()),
      defined_(true) {}

bool Array::is_contiguous() const {
  if (numel() == 0) return true;
  const Shape whole = contiguous_strides(sizes_);
  for (int64_t i = 0; i < sizes_.kept(); ++i) {
    if (size(i) != 1 && stride(i) != whole[i]) return false;
  }
  return true;
}

Array Array::narrow(int64_t dim, int64_t start, int64_t length) const {
  Array part = *this;
  part.sizes_[dim] = length;
  part.data_ = static_cast<char*>(data_) + start * stride(dim) * element_size_;
  part.is_view_ = true;
  return part;
}

Array Array::select(int64_t dim, int64_t index) const {
  Array part = narrow(dim, index, 1);
  Shape sizes = part.sizes_, strides = part.strides_;
  int64_t to = 0;
  for (int64_t i = 0; i < this->dim(); ++i) {
    if (i == dim) continue;
    sizes[to] = size(i);
    strides[to++] = stride(i);
  }
  part.sizes_ = Shape(sizes.begin(), to);
  part.strides_ = Shape(strides.begin(), to);
  return part;
}

Array Array::t() const {
  Array turned = *this;
  turned.sizes_ = {size(1), size(0)};
  turned.strides_ = {stride(1), stride(0)};
  turned.is_view_ = true;
  return turned;
}

Array Array::view(const Shape& sizes) const {
  check(is_contiguous() && sizes.product() == numel(), "a view of ", sizes_, " as ", sizes);
  Array other = *this;
  other.sizes_ = sizes;
  other.strides_ = contiguous_strides(sizes);
  other.is_view_ = true;
  return other;
}

void fill_memory(bool fills) { is_filling = fills; }
bool is_filling_memory() { return is_filling; }

Array empty(const Shape& sizes, ScalarType dtype, Device device) {
  using torch::stable::detail::to;
  const Shape strides = contiguous_strides(sizes);
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error =
      aoti_torch_empty_strided(sizes.count(), sizes.begin(), strides.begin(),
                               to<int32_t>(torch::stable::detail::from(dtype)), device.type, device.index, &handle);
  check(error == 0, "torch has no memory for a tensor of shape ", sizes, " and dtype ", dtype, " on ", device);
  const Array array(handle);
  const bool has_memory = array.is_cpu() && array.numel() > 0;
  if (has_memory && is_filling) std::memset(array.data(), 0xff, static_cast<size_t>(array.nbytes()));
  return array;
}

Array tensor_in(std::shared_ptr<void> memory, void* data, const Shape& sizes, ScalarType dtype) {
  using torch::stable::detail::to;
  auto* const held = new std::shared_ptr<void>(std::move(memory));
  const auto let_go = [](void*, void* context) { delete static_cast<std::shared_ptr<void>*>(context); };
  const Shape strides = contiguous_strides(sizes);
  AtenTensorHandle handle = nullptr;
  call(torch_from_blob(data, sizes.count(), sizes.begin(), strides.begin(), 0,
                       to<int32_t>(torch::stable::detail::from(dtype)), cpu().type, cpu().index, &handle,
                       aoti_torch_layout_strided(), nullptr, 0, let_go, held),
       "a tensor in memory that is there");
  return Array(handle);
}

Array tensor_at(void* data, const Shape& sizes, const Shape& strides, ScalarType dtype) {
  using torch::stable::detail::to;
  AtenTensorHandle handle = nullptr;
  call(aoti_torch_create_tensor_from_blob(data, sizes.count(), sizes.begin(), strides.begin(), 0,
                                          to<int32_t>(torch::stable::detail::from(dtype)), cpu().type, cpu().index,
                                          &handle),
       "a tensor in memory that is there");
  return Array(handle);
}

Array as_tensor(const Array& view) {
  if (view.is_tensor()) return view;
  const void* first = nullptr;
  call(torch_get_const_data_ptr(view.handle(), &first), "data_ptr");
  const int64_t offset = (view.data<const char>() - static_cast<const char*>(first)) / view.element_size();
  AtenTensorHandle handle = nullptr;
  call(aoti_torch__reinterpret_tensor(view.handle(), view.dim(), view.sizes().begin(), view.strides().begin(), offset,
                                      &handle),
       "a view");
  return Array(handle);
}

Array contiguous(const Array& t) {
  if (t.is_contiguous()) return t;
  check(t.is_tensor(), "a view of ", t.sizes(), " has gaps");
  return of(torch::stable::contiguous(torch::stable::Tensor(new_handle(t.handle()))));
}

void zero(const Array& t) {
  if (t.numel() == 0) return;
  if (t.is_contiguous()) {
    std::memset(t.data(), 0, static_cast<size_t>(t.nbytes()));
    return;
  }
  for (int64_t i = 0; i < t.size(0); ++i) zero(t.select(0, i));
}

int64_t num_threads() {
  uint32_t threads = 0;
  call(torch_get_num_threads(&threads), "the number of threads");
  return threads;
}

int64_t thread_index() {
  uint32_t index = 0;
  call(torch_get_thread_idx(&index), "a thread's index");
  return index;
}

}  // namespace fastbert
