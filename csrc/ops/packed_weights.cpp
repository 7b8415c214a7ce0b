#include "packed_weights.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

namespace fastbert {
namespace {

// One view of one storage: the same weight may be packed in two formats, and transposed.
using Key = std::tuple<const void*, int64_t, int64_t, int64_t, int64_t, at::ScalarType, DType>;

struct Entry {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  int64_t version;
  uint64_t sample;
  PackedTensor packed;
};

std::mutex mutex;
std::map<Key, Entry>& entries() {
  // Never destroyed: at exit tensors may go after static objects.
  static auto* map = new std::map<Key, Entry>();
  return *map;
}

uint64_t sample_of(const at::Tensor& weight) {
  const auto* bytes = static_cast<const char*>(weight.const_data_ptr());
  const int64_t out = weight.size(0), in = weight.size(1), size = weight.element_size();
  uint64_t hash = 1469598103934665603u;
  for (int64_t i = 0; i < 16; ++i) {
    const int64_t row = i * (out - 1) / 15, column = (i * 7 % 16) * (in - 1) / 15;
    uint32_t bits = 0;
    std::memcpy(&bits, bytes + (row * weight.stride(0) + column * weight.stride(1)) * size, static_cast<size_t>(size));
    hash = (hash ^ bits) * 1099511628211u;
  }
  return hash;
}

void pack(const at::Tensor& weight, DType format, PackedTensor& packed) {
  const int64_t panels = num_panels(weight.size(0)), bytes = panels * panel_bytes(format, weight.size(1));
  // A buffer that nobody else reads any more is written again: a training step packs every weight anew.
  if (!packed.panels.defined() || packed.panels.numel() != bytes || packed.panels.use_count() > 1) {
    packed.panels = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  }
  if (format == DType::kInt8)
    packed.channel_offsets = at::empty({panels * kPanel}, at::TensorOptions().dtype(at::kInt));
  const PackArgs args{weight.const_data_ptr(),
                      dtype_of(weight),
                      weight.size(0),
                      weight.size(1),
                      weight.stride(0),
                      weight.stride(1),
                      format,
                      static_cast<char*>(packed.panels.mutable_data_ptr()),
                      format == DType::kInt8 ? packed.channel_offsets.mutable_data_ptr<int32_t>() : nullptr};
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) { pack_panels(args, begin, end); });
}

}  // namespace

DType dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kChar:
      return DType::kInt8;
    default:
      TORCH_CHECK(false, "dtype is ", t.scalar_type(), ", expected Float, BFloat16 or Char");
  }
}

PackedTensor packed_weight(const at::Tensor& weight_, DType format) {
  const bool is_matrix = weight_.stride(0) == 1 || weight_.stride(1) == 1;
  const at::Tensor weight = is_matrix ? weight_ : weight_.contiguous();
  const Key key{weight.const_data_ptr(), weight.size(0),       weight.size(1), weight.stride(0),
                weight.stride(1),        weight.scalar_type(), format};
  // An inference tensor keeps no version: its samples alone tell.
  const int64_t version = weight.is_inference() ? 0 : weight._version();
  const uint64_t sample = weight.numel() == 0 ? 0 : sample_of(weight);
  auto* const storage = weight.storage().unsafeGetStorageImpl();
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = entries().find(key);
  if (found != entries().end()) {
    Entry& entry = found->second;
    const bool same = entry.storage._unsafe_get_target() == storage && !entry.storage.expired();
    if (same && entry.version == version && entry.sample == sample) return entry.packed;
    if (same) {
      pack(weight, format, entry.packed);
      entry.version = version;
      entry.sample = sample;
      return entry.packed;
    }
  }
  for (auto it = entries().begin(); it != entries().end();) {
    it = it->second.storage.expired() ? entries().erase(it) : std::next(it);
  }
  Entry entry{c10::weak_intrusive_ptr<c10::StorageImpl>(weight.storage().getWeakStorageImpl()), version, sample, {}};
  pack(weight, format, entry.packed);
  return entries().insert_or_assign(key, std::move(entry)).first->second.packed;
}

int64_t packed_bytes() {
  const std::lock_guard<std::mutex> lock(mutex);
  int64_t bytes = 0;
  for (const auto& [key, entry] : entries()) bytes += entry.storage.expired() ? 0 : entry.packed.panels.numel();
  return bytes;
}

}  // namespace fastbert
