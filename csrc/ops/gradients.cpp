#include "gradients.h"

#include <ATen/ops/empty.h>

#include <map>
#include <mutex>

namespace fastbert {

at::Tensor gradient_like(const at::Tensor& weight) {
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> weight;
    c10::Storage gradient;
  };
  static std::mutex mutex;
  static auto* entries = new std::map<const void*, Entry>();  // never destroyed: tensors may outlive static objects
  const size_t bytes = weight.numel() * weight.element_size();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = entries->find(weight.const_data_ptr());
  if (found != entries->end() && !found->second.weight.expired() && found->second.gradient.use_count() == 1 &&
      found->second.gradient.nbytes() == bytes) {
    return at::empty({0}, weight.options()).set_(found->second.gradient, 0, weight.sizes(), {});
  }
  for (auto it = entries->begin(); it != entries->end();) {
    it = it->second.weight.expired() ? entries->erase(it) : std::next(it);
  }
  const at::Tensor gradient = at::empty(weight.sizes(), weight.options());
  // Two gradients of one weight may be alive at once (accumulation): the newer one is kept.
  entries->insert_or_assign(weight.const_data_ptr(), Entry{weight.storage().getWeakStorageImpl(), gradient.storage()});
  return gradient;
}

}  // namespace fastbert
