#include "gradients.h"

#include <map>
#include <mutex>
#include <unordered_map>

#include "storages.h"
#include "workspace.h"

namespace fastbert {
namespace {

std::mutex mutex;

// By storage, then by the weight's place in it.
using Gradients = std::unordered_map<const void*, std::map<const void*, std::shared_ptr<Block>>>;
Gradients& gradients() {
  static auto* map = new Gradients();  // never destroyed: tensors may outlive static objects
  return *map;
}

}  // namespace

Array gradient_like(const Array& weight) {
  watch_storage(weight);
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Block>& block = gradients()[storage_of(weight)][weight.data()];
  // Two gradients of one weight may be alive at once (accumulation): the newer one is kept.
  if (block.use_count() != 1 || block->bytes() != weight.nbytes()) block = new_block(weight.nbytes());
  return tensor_in(block, block->data(), weight.sizes(), weight.scalar_type());
}

void forget_gradients(const void* storage) {
  Gradients::node_type forgotten;  // freed after the lock
  const std::lock_guard<std::mutex> lock(mutex);
  forgotten = gradients().extract(storage);
}

}  // namespace fastbert
