// What the operators know of a tensor, as fields. libtorch's stable ABI gives tensors as handles, each of whose
// properties is a call, and no views that cost less than an operator of its own.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fastbert {

using torch::headeronly::ScalarType;

// Throws what Python raises as a RuntimeError, in the words of `message`.
template <typename... Message>
[[noreturn]] void fail(const Message&... message) {
  std::ostringstream text;
  (text << ... << message);
  throw std::runtime_error(text.str());
}

template <typename... Message>
void check(bool holds, const Message&... message) {
  if (!holds) fail(message...);
}

// A call of libtorch's. The words of its own error do not come through the stable ABI of torch 2.11.
inline void call(AOTITorchError error, const char* what) { check(error == 0, "torch failed: ", what); }

// Another handle of the same tensor, to be handed on or deleted.
AtenTensorHandle new_handle(AtenTensorHandle tensor);

// As libtorch's C functions count them; an index below 0 means any device of its type.
struct Device {
  int32_t type, index;
};
inline const int32_t kCpu = aoti_torch_device_type_cpu();
inline Device cpu() { return {kCpu, -1}; }
std::ostream& operator<<(std::ostream& out, const Device& device);

std::ostream& operator<<(std::ostream& out, ScalarType dtype);

int64_t element_size(ScalarType dtype);

// Up to four sizes, or strides in elements. Of more, which no operator takes, only the number is kept.
class Shape {
 public:
  static constexpr int64_t kMost = 4;

  Shape() = default;
  Shape(std::initializer_list<int64_t> values);
  Shape(const int64_t* values, int64_t count);

  int64_t count() const { return count_; }
  int64_t kept() const { return count_ < kMost ? count_ : kMost; }
  int64_t operator[](int64_t i) const { return values_[static_cast<size_t>(i)]; }
  int64_t& operator[](int64_t i) { return values_[static_cast<size_t>(i)]; }
  int64_t product() const;
  const int64_t* begin() const { return values_.data(); }

  friend bool operator==(const Shape& a, const Shape& b) { return a.count_ == b.count_ && a.values_ == b.values_; }

 private:
  std::array<int64_t, kMost> values_{};  // zeros beyond count_
  int64_t count_ = 0;
};
std::ostream& operator<<(std::ostream& out, const Shape& shape);

// A tensor, a view of one, or memory that no tensor has (workspace.h). Undefined until it is given one: so absent
// operands and results are passed on.
class Array {
 public:
  Array() = default;
  explicit Array(AtenTensorHandle tensor);         // takes the handle over
  static Array borrowed(AtenTensorHandle tensor);  // the handle must outlive it and its copies
  Array(std::shared_ptr<void> memory, void* data, const Shape& sizes, ScalarType dtype);

  bool defined() const { return defined_; }
  int64_t dim() const { return sizes_.count(); }
  const Shape& sizes() const { return sizes_; }
  int64_t size(int64_t i) const { return sizes_[i]; }
  int64_t stride(int64_t i) const { return strides_[i]; }
  const Shape& strides() const { return strides_; }
  int64_t numel() const { return sizes_.product(); }
  int64_t element_size() const { return element_size_; }
  int64_t nbytes() const { return numel() * element_size_; }
  ScalarType scalar_type() const { return dtype_; }
  Device device() const { return device_; }
  bool is_cpu() const { return device_.type == kCpu; }
  bool is_contiguous() const;

  // Null where it is undefined.
  template <typename T = void>
  T* data() const {
    return static_cast<T*>(data_);
  }

  // Views, of the same memory.
  Array narrow(int64_t dim, int64_t start, int64_t length) const;
  Array select(int64_t dim, int64_t index) const;
  Array t() const;
  Array view(const Shape& sizes) const;  // of what is contiguous

  // Of the tensor that this is, or is a view of; null for other memory.
  AtenTensorHandle handle() const { return handle_; }
  bool is_view() const { return is_view_; }
  bool is_tensor() const { return handle_ != nullptr && !is_view_; }

 private:
  void read_fields();

  std::shared_ptr<void> owner_;
  AtenTensorHandle handle_ = nullptr;
  void* data_ = nullptr;
  Shape sizes_, strides_;
  int64_t element_size_ = 0;
  ScalarType dtype_ = ScalarType::Undefined;
  Device device_{0, -1};
  bool defined_ = false, is_view_ = false;
};

// What a schema calls `Tensor?`: undefined for None.
struct OptionalArray : Array {
  using Array::Array;
  OptionalArray(Array array) : Array(std::move(array)) {}
};

// A new tensor, of which nothing is written: an operator that returns it writes all of it.
Array empty(const Shape& sizes, ScalarType dtype, Device device);
inline Array empty(const Shape& sizes, ScalarType dtype) { return empty(sizes, dtype, cpu()); }
// Where a function's result lies: `empty` for what an operator returns, `workspace` (workspace.h) for what it uses.
using MakeArray = Array (*)(const Shape& sizes, ScalarType dtype);
// In the dtype and on the device of `like`.
inline Array empty(const Shape& sizes, const Array& like) { return empty(sizes, like.scalar_type(), like.device()); }
inline Array empty_like(const Array& t) { return empty(t.sizes(), t.scalar_type(), t.device()); }

// For tests: from now on new tensors on the CPU, workspaces and blocks are filled with NaN, so that what was not
// written shows; no workspace is one that was used before.
void fill_memory(bool fills);
bool is_filling_memory();

// A view as a tensor of its own, for libtorch's operators.
Array as_tensor(const Array& view);

// A new tensor on the CPU in `memory`, which it holds.
Array tensor_in(std::shared_ptr<void> memory, void* data, const Shape& sizes, ScalarType dtype);

// A tensor on the CPU in memory that outlives it; strides in elements.
Array tensor_at(void* data, const Shape& sizes, const Shape& strides, ScalarType dtype);

// t itself, or a copy of the tensor that it is.
Array contiguous(const Array& t);

void zero(const Array& t);  // on a CPU

int64_t num_threads();
int64_t thread_index();  // within a parallel loop

// f(i) for each i below `count`, each in a thread of its own if torch has as many.
template <typename F>
void in_torch_threads(int64_t count, const F& f) {
  const auto run = [](int64_t begin, int64_t end, void* context) {
    for (int64_t i = begin; i < end; ++i) (*static_cast<const F*>(context))(i);
  };
  call(torch_parallel_for(0, count, 1, run, const_cast<F*>(&f)), "a parallel loop");
}

// Of a team (team.h), which meets within a microsecond, a thread is worth waking for a fourth of the work.
constexpr int64_t kTeamGrain = 4;
bool leads_team();

// By the team that the calling thread leads; false where it leads none.
bool run_in_team(int64_t count, void (*f)(int64_t index, void* context), void* context);

// The same, by the calling thread's team if it leads one: there a thread may do the work of several.
template <typename F>
void in_threads(int64_t count, const F& f) {
  const auto run = [](int64_t i, void* context) { (*static_cast<const F*>(context))(i); };
  if (!run_in_team(count, run, const_cast<F*>(&f))) in_torch_threads(count, f);
}

// f(task) for every task below `count`, each thread taking the next one when it is done with its last: where something
// else takes a core for a while, the others go on.
template <typename F>
void run_tasks(int64_t count, const F& f) {
  std::atomic<int64_t> next{0};
  in_threads(std::min(count, num_threads()), [&](int64_t) {
    for (int64_t task = next++; task < count; task = next++) f(task);
  });
}

// f(begin, end) over parts of [begin, end) of at least `grain`. In loops of one length a thread begins with the same
// share, which it may still have in its caches, and then takes what is left of others' shares.
template <typename F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  if (leads_team()) grain = (grain + kTeamGrain - 1) / kTeamGrain;
  const int64_t count = end - begin, threads = std::min(num_threads(), (count + grain - 1) / grain);
  if (threads <= 1) {
    if (count > 0) f(begin, end);
    return;
  }
  struct alignas(64) Share {  // a cache line each: the threads count in them
    std::atomic<int64_t> next;
    int64_t end;
  };
  std::vector<Share> shares(static_cast<size_t>(threads));
  for (int64_t t = 0; t < threads; ++t) {
    shares[static_cast<size_t>(t)].next = begin + count * t / threads;
    shares[static_cast<size_t>(t)].end = begin + count * (t + 1) / threads;
  }
  constexpr int64_t kParts = 4;  // of a share
  const int64_t length = std::max(grain, (count / threads + kParts - 1) / kParts);
  in_threads(threads, [&](int64_t thread) {
    for (int64_t i = 0; i < threads; ++i) {
      Share& share = shares[static_cast<size_t>((thread + i) % threads)];
      for (int64_t from = share.next.fetch_add(length); from < share.end; from = share.next.fetch_add(length)) {
        f(from, std::min(share.end, from + length));
      }
    }
  });
}

}  // namespace fastbert
