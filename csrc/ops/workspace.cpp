#include "workspace.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "../include/scratch.h"

namespace fastbert {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kMostKept = int64_t{256} << 20;
constexpr int64_t kSmall = int64_t{64} << 10;  // the allocator serves these at once

// From here on a block that lasts is mapped by itself: what glibc does, too, before it has seen larger ones freed.
constexpr int64_t kMapped = int64_t{128} << 10;
constexpr size_t kHugePage = size_t{2} << 20;

// From a huge page's begin on, so that as much as may be lies in such pages: a step reads all weights and gradients,
// and waits for the addresses of small ones. What lies around it is given back, or a whole page would serve a small
// block.
char* mapped_block(size_t bytes) {
  const size_t whole = bytes + kHugePage;
  void* const found = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  char* const mapping = static_cast<char*>(found);
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(mapping) % kHugePage) % kHugePage;
  char* const data = mapping + before;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), used = (bytes + page - 1) / page * page;
  if (before > 0) munmap(mapping, before);
  if (whole - before > used) munmap(data + used, whole - before - used);
#ifdef MADV_HUGEPAGE
  madvise(data, bytes, MADV_HUGEPAGE);  // it serves as well without
#endif
  return data;
}

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
    // Those that are too small make room, or the oldest.
    blocks_.erase(std::remove_if(blocks_.begin(), blocks_.end(),
                                 [&](const std::shared_ptr<Block>& block) {
                                   const bool goes = (takes_any_size_ || total > kMostKept) && block.use_count() == 1;
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

Block::Block(int64_t bytes, bool lasts) : bytes_(bytes) {
  const auto rounded = static_cast<size_t>(std::max(kLine, (bytes + kLine - 1) / kLine * kLine));
  if (lasts && bytes >= kMapped && kFence == 0) {
    mapped_ = rounded;
    data_ = mapped_block(rounded);
    return;
  }
  data_ = static_cast<char*>(std::aligned_alloc(kLine, rounded));
  if (data_ == nullptr) throw std::bad_alloc();
}

Block::~Block() {
  if (mapped_ > 0) {
    munmap(data_, mapped_);
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
