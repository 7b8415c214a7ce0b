#include "gradients.h"

#include <map>
#include <mutex>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "packed_weights.h"
#include "storages.h"
#include "workspace.h"

namespace fastbert {
namespace {

std::mutex mutex;

// The last gradient, and the memory of the one before: two of one weight may be alive at once, where gradients are
// accumulated, or where a layer multiplies by it twice (a word table that is also the decoder, DeBERTa's projections).
struct Last {
  std::shared_ptr<Block> block, before;
  std::shared_ptr<std::vector<double>> squares;
};

// By storage, then by the weight's place in it.
using Gradients = std::unordered_map<const void*, std::map<const void*, Last>>;
Gradients& gradients() {
  static auto* map = new Gradients();  // never destroyed: tensors may outlive static objects
  return *map;
}

const KeptBeside kept_beside(forget_gradients);

}  // namespace

NewGradient new_gradient(const Array& weight) {
  watch_storage(weight);
  const std::lock_guard<std::mutex> lock(mutex);
  auto& [block, before, squares] = gradients()[storage_of(weight)][weight.data()];
  const auto is_free = [&] { return block.use_count() == 1 && block->bytes() == weight.nbytes(); };
  if (!is_free()) std::swap(block, before);
  if (!is_free()) block = lasting_block(weight.nbytes());
  squares = std::make_shared<std::vector<double>>();
  return {tensor_in(block, block->data(), weight.sizes(), weight.scalar_type()), squares};
}

std::optional<double> known_squares(const Array& weight, const Array& gradient) {
  std::shared_ptr<std::vector<double>> squares;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto storage = gradients().find(storage_of(weight));
    if (storage == gradients().end()) return std::nullopt;
    const auto last = storage->second.find(weight.data());
    if (last == storage->second.end() || last->second.block->data() != gradient.data<char>()) return std::nullopt;
    squares = last->second.squares;
  }
  if (squares->empty() || gradient.nbytes() != weight.nbytes() || version_of(gradient) != 0) return std::nullopt;
  return std::accumulate(squares->begin(), squares->end(), 0.0);
}

void forget_gradients(const void* storage) {
  Gradients::node_type forgotten;  // freed after the lock
  const std::lock_guard<std::mutex> lock(mutex);
  forgotten = gradients().extract(storage);
}

}  // namespace fastbert
