#include "lasting_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <new>

namespace fastbert {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kRegion = 32 * kHugePage;  // address space; memory is what somebody has written to

char* up_to_huge_page(char* p) { return p + (kHugePage - reinterpret_cast<uintptr_t>(p) % kHugePage) % kHugePage; }

// A stretch of huge pages that blocks share. A weight of a small model is no whole huge page, and in pages of 4 KB a
// short text waits for their addresses: 16 rows of MiniLM's layers in float32 took 1.10 times as long (EPYC, Zen 4).
class Region {
 public:
  explicit Region(size_t bytes) {
    const size_t whole = bytes + kHugePage;
    void* const mapped = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    char* const mapping = static_cast<char*>(mapped);
    begin_ = up_to_huge_page(mapping);
    end_ = begin_ + bytes;
    if (begin_ > mapping) munmap(mapping, static_cast<size_t>(begin_ - mapping));
    if (mapping + whole > end_) munmap(end_, static_cast<size_t>(mapping + whole - end_));
#ifdef MADV_HUGEPAGE
    madvise(begin_, bytes, MADV_HUGEPAGE);  // it serves as well without
#endif
    free_[begin_] = bytes;
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { munmap(begin_, static_cast<size_t>(end_ - begin_)); }

  bool has(const char* p) const { return begin_ <= p && p < end_; }
  bool is_free() const { return free_.size() == 1 && free_.begin()->second == static_cast<size_t>(end_ - begin_); }

  // The first place that is large enough, or null.
  char* take(size_t bytes) {
    const auto at = std::find_if(free_.begin(), free_.end(), [&](const auto& range) { return range.second >= bytes; });
    if (at == free_.end()) return nullptr;
    auto [begin, size] = *at;
    free_.erase(at);
    if (size > bytes) free_[begin + bytes] = size - bytes;
    return begin;
  }

  // Whole huge pages that are free now go back to the system; a part of one stays for the next who takes.
  void give(char* begin, size_t bytes) {
    const auto after = free_.lower_bound(begin);
    if (after != free_.end() && begin + bytes == after->first) {
      bytes += after->second;
      free_.erase(after);
    }
    const auto next = free_.lower_bound(begin);
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == begin) {
        begin = before->first;
        bytes += before->second;
        free_.erase(before);
      }
    }
    free_[begin] = bytes;
    char* const page = up_to_huge_page(begin);
    if (begin + bytes < page + kHugePage) return;
    madvise(page, static_cast<size_t>(begin + bytes - page) / kHugePage * kHugePage, MADV_DONTNEED);
  }

 private:
  char *begin_, *end_;
  std::map<char*, size_t> free_;  // sizes by begin; no two of them touch
};

std::mutex mutex;
std::list<Region>& regions() {
  // Never destroyed: at exit tensors may go after static objects.
  static auto* list = new std::list<Region>();
  return *list;
}

}  // namespace

char* take_lasting(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (Region& region : regions()) {
    if (char* const data = region.take(bytes)) return data;
  }
  return regions().emplace_back(std::max(kRegion, (bytes + kHugePage - 1) / kHugePage * kHugePage)).take(bytes);
}

void give_lasting(char* data, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto region =
      std::find_if(regions().begin(), regions().end(), [&](const Region& each) { return each.has(data); });
  region->give(data, bytes);
  if (region->is_free()) regions().erase(region);
}

}  // namespace fastbert
