// A thread's scratch memory, kept from call to call: fresh pages cost more than what is done with them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace fastbert {

// AddressSanitizer knows the ends of what the system's allocator gives, not of parts of it: under it there are fences
// behind the parts, which no code may touch.
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kFence = 64;
inline void forbid(char* from, int64_t size) { __asan_poison_memory_region(from, static_cast<size_t>(size)); }
inline void allow(char* from, int64_t size) { __asan_unpoison_memory_region(from, static_cast<size_t>(size)); }
#else
constexpr int64_t kFence = 0;
inline void forbid(char*, int64_t) {}
inline void allow(char*, int64_t) {}
#endif

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
    allow(data_, rounded(size));
    forbid(data_ + rounded(size), rounded(size_) - rounded(size));
    return data_;
  }

  static int64_t rounded(int64_t size) { return (size + kLine - 1) / kLine * kLine; }

 private:
  static constexpr int64_t kLine = 64;
  char* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace fastbert
