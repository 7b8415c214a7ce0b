#include "workspace.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "../include/scratch.h"

namespace fastbert {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kMostKept = int64_t{64} << 20;
constexpr int64_t kSmall = int64_t{64} << 10;  // the allocator serves these at once

}  // namespace

Block::Block(int64_t bytes) : bytes_(bytes) {
  const auto rounded = static_cast<size_t>(std::max(kLine, (bytes + kLine - 1) / kLine * kLine));
  data_ = static_cast<char*>(std::aligned_alloc(kLine, rounded));
  if (data_ == nullptr) throw std::bad_alloc();
}

Block::~Block() { std::free(data_); }

std::shared_ptr<Block> new_block(int64_t bytes) {
  auto block = std::make_shared<Block>(bytes);
  if (is_filling_memory()) std::memset(block->data(), 0xff, static_cast<size_t>(bytes));
  return block;
}

Array workspace(const Shape& sizes, ScalarType dtype) {
  static thread_local std::vector<std::shared_ptr<Block>> kept;
  const int64_t bytes = sizes.product() * element_size(dtype);
  const auto array = [&](const std::shared_ptr<Block>& block) { return Array(block, block->data(), sizes, dtype); };
  // With fences each ends where it should: what is kept may be longer.
  const bool must_be_new = is_filling_memory() || kFence > 0;
  if (bytes < kSmall || bytes > kMostKept || must_be_new) return array(new_block(bytes));
  int64_t total = bytes;
  const std::shared_ptr<Block>* best = nullptr;
  for (const auto& block : kept) {
    total += block->bytes();
    const bool fits = block.use_count() == 1 && block->bytes() >= bytes && block->bytes() / 2 <= bytes;
    if (fits && (best == nullptr || block->bytes() < (*best)->bytes())) best = &block;
  }
  if (best != nullptr) return array(*best);
  // The oldest make room.
  kept.erase(std::remove_if(kept.begin(), kept.end(),
                            [&](const std::shared_ptr<Block>& block) {
                              const bool goes = total > kMostKept && block.use_count() == 1;
                              total -= goes ? block->bytes() : 0;
                              return goes;
                            }),
             kept.end());
  const auto fresh = new_block(bytes);
  if (total <= kMostKept) kept.push_back(fresh);
  return array(fresh);
}

}  // namespace fastbert
