// A thread's scratch memory, kept from call to call: fresh pages cost more than what is done with them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace fastbert {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // At least `size` bytes from a cache line's start; what they held is lost when they grow.
  char* get(int64_t size) {
    if (size > size_) {
      std::free(data_);
      size_ = 0;
      data_ = static_cast<char*>(std::aligned_alloc(kLine, static_cast<size_t>(rounded(size))));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = size;
    }
    return data_;
  }

  static int64_t rounded(int64_t size) { return (size + kLine - 1) / kLine * kLine; }

 private:
  static constexpr int64_t kLine = 64;
  char* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace fastbert
