#include "workspace.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "../include/scratch.h"
#include "lasting_memory.h"

namespace fastbert {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kMostKept = int64_t{256} << 20;
constexpr int64_t kMostTokens = int64_t{4} << 20;  // new pages for 3 MB take 1 % of MiniLM's time for a batch in int8

std::shared_ptr<Block> filled(std::shared_ptr<Block> block) {
  if (is_filling_memory()) std::memset(block->data(), 0xff, static_cast<size_t>(block->bytes()));
  return block;
}

// The memory of one thread. Each part lies in the first gap that holds it. A part for which there is too little memory
// has a block of its own, but takes its place here all the same: once all parts are given back, the arena is made as
// long as those places would have been. So it is as long as the largest call needs, whatever calls come in between.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  std::shared_ptr<void> take(int64_t bytes, void** data) {
    // With fences each ends where it should, and what is to be filled must be new.
    if (is_filling_memory() || kFence > 0) {
      auto block = new_block(bytes);
      *data = block->data();
      return block;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (taken_.empty() && size() < most_) {
      memory_.reset();  // before it takes new memory
      memory_ = lasting_block(most_);
    }
    const int64_t length = std::max(kLine, (bytes + kLine - 1) / kLine * kLine);
    int64_t begin = 0;
    auto next = taken_.begin();
    for (; next != taken_.end() && next->begin - begin < length; ++next) begin = next->end;
    if (begin + length <= kMostKept) most_ = std::max(most_, begin + length);
    const bool fits = begin + length <= size();
    auto block = fits ? memory_ : lasting_block(length);
    *data = block->data() + (fits ? begin : 0);
    taken_.insert(next, {begin, begin + length});
    return std::make_shared<Part>(shared_from_this(), std::move(block), begin);
  }

 private:
  struct Range {
    int64_t begin, end;
  };

  struct Part {
    std::shared_ptr<Arena> arena;
    std::shared_ptr<Block> block;
    int64_t begin;

    Part(std::shared_ptr<Arena> arena, std::shared_ptr<Block> block, int64_t begin)
        : arena(std::move(arena)), block(std::move(block)), begin(begin) {}
    ~Part() { arena->give(begin); }
  };

  int64_t size() const { return memory_ == nullptr ? 0 : memory_->bytes(); }

  void give(int64_t begin) {
    const std::lock_guard<std::mutex> lock(mutex_);
    taken_.erase(std::find_if(taken_.begin(), taken_.end(), [&](const Range& range) { return range.begin == begin; }));
  }

  std::mutex mutex_;  // another thread may hold a part last
  std::shared_ptr<Block> memory_;
  std::vector<Range> taken_;  // in order
  int64_t most_ = 0;          // where the last part ended, at most
};

Array taken(Arena& arena, const Shape& sizes, ScalarType dtype) {
  void* data = nullptr;
  auto memory = arena.take(sizes.product() * element_size(dtype), &data);
  return Array(std::move(memory), data, sizes, dtype);
}

}  // namespace

// AddressSanitizer sees what goes beyond a block of the allocator's, not beyond a part of a region.
Block::Block(int64_t bytes, bool lasts)
    : bytes_(bytes),
      is_lasting_(lasts && kFence == 0),
      rounded_(static_cast<size_t>(std::max(kLine, (bytes + kLine - 1) / kLine * kLine))) {
  data_ = is_lasting_ ? take_lasting(rounded_) : static_cast<char*>(std::aligned_alloc(kLine, rounded_));
  if (data_ == nullptr) throw std::bad_alloc();
}

Block::~Block() {
  if (is_lasting_) {
    give_lasting(data_, rounded_);
  } else {
    std::free(data_);
  }
}

std::shared_ptr<Block> new_block(int64_t bytes) { return filled(std::make_shared<Block>(bytes, false)); }

std::shared_ptr<Block> lasting_block(int64_t bytes) { return filled(std::make_shared<Block>(bytes, true)); }

Array workspace(const Shape& sizes, ScalarType dtype) {
  static thread_local const auto arena = std::make_shared<Arena>();
  return taken(*arena, sizes, dtype);
}

Array token_workspace(const Shape& sizes, ScalarType dtype) {
  const int64_t bytes = sizes.product() * element_size(dtype);
  if (bytes <= kMostTokens) return workspace(sizes, dtype);
  const auto block = lasting_block(bytes);
  return Array(block, block->data(), sizes, dtype);
}

Array panels_workspace(int64_t bytes) {
  static thread_local const auto arena = std::make_shared<Arena>();
  return taken(*arena, {bytes}, ScalarType::Byte);
}

}  // namespace fastbert
