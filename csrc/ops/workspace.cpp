#include "workspace.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "../include/scratch.h"
#include "lasting_memory.h"

namespace fastbert {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kMostKept = int64_t{256} << 20;
constexpr int64_t kSmall = int64_t{64} << 10;  // the allocator serves these at once

std::shared_ptr<Block> filled(std::shared_ptr<Block> block) {
  if (is_filling_memory()) std::memset(block->data(), 0xff, static_cast<size_t>(block->bytes()));
  return block;
}

// Blocks that one thread uses again.
class KeptBlocks {
 public:
  // takes_any_size: what is large serves what is small, too, and nothing smaller is kept beside it; otherwise it serves
  // no less than half of itself.
  explicit KeptBlocks(bool takes_any_size) : takes_any_size_(takes_any_size) {}

  std::shared_ptr<Block> take(int64_t bytes) {
    // With fences each ends where it should: what is kept may be longer.
    const bool must_be_new = is_filling_memory() || kFence > 0;
    if (bytes < kSmall || bytes > kMostKept || must_be_new) return new_block(bytes);
    int64_t total = bytes;
    const std::shared_ptr<Block>* best = nullptr;
    for (const auto& block : blocks_) {
      total += block->bytes();
      const bool fits =
          block.use_count() == 1 && block->bytes() >= bytes && (takes_any_size_ || block->bytes() / 2 <= bytes);
      if (fits && (best == nullptr || block->bytes() < (*best)->bytes())) best = &block;
    }
    if (best != nullptr) return *best;
    // Those that the new one serves for go, or there would be one for each batch that was the largest so far; and the
    // oldest, where there is no room.
    blocks_.erase(std::remove_if(blocks_.begin(), blocks_.end(),
                                 [&](const std::shared_ptr<Block>& block) {
                                   const bool is_served =
                                       block->bytes() < bytes && (takes_any_size_ || bytes / 2 <= block->bytes());
                                   const bool goes = (is_served || total > kMostKept) && block.use_count() == 1;
                                   total -= goes ? block->bytes() : 0;
                                   return goes;
                                 }),
                  blocks_.end());
    if (total > kMostKept) return new_block(bytes);  // given back with the call
    blocks_.push_back(lasting_block(bytes));
    return blocks_.back();
  }

 private:
  bool takes_any_size_;
  std::vector<std::shared_ptr<Block>> blocks_;
};

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
  static thread_local KeptBlocks kept(false);
  const auto block = kept.take(sizes.product() * element_size(dtype));
  return Array(block, block->data(), sizes, dtype);
}

Array panels_workspace(int64_t bytes) {
  static thread_local KeptBlocks kept(true);
  const auto block = kept.take(bytes);
  return Array(block, block->data(), {bytes}, ScalarType::Byte);
}

}  // namespace fastbert
