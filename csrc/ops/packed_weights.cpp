#include "packed_weights.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>

namespace fastbert {
namespace {

// Steps of a panel that are compared at a time: 16 KB. Whole blocks of the packing code, which then does to each
// element what it did when it packed all of them.
constexpr int64_t kCheckSteps = 64;
constexpr int64_t kUnitBytes = kCheckSteps * kPanel * 4;

// One view of one storage: the same weight may be packed in two formats, and transposed, and a storage may hold many.
using View = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, at::ScalarType, DType>;

int64_t source_bytes(const View& view) {
  return std::get<1>(view) * std::get<2>(view) * static_cast<int64_t>(c10::elementSize(std::get<5>(view)));
}

// Copies of each byte of a storage: two formats, each of them transposed, of layers' weights and of a merged one.
constexpr int64_t kMostCopies = 8;

// A handle of a version counter is a pointer, and torch has no other way to compare two.
static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
bool is_same(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

struct Entry {
  c10::VariableVersion counter;  // held, so that no other has its address
  int64_t version;
  uint64_t sample;
  int64_t uses;
  PackedTensor packed;
};

struct Copies {
  // Holds the address, not the memory: no other storage gets this address before forget_packed has been told.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const char* data;  // where the storage's memory was: resizing moves it
  std::map<View, Entry> entries;
};

using CopiesOfStorages = std::unordered_map<const void*, Copies>;

// Nothing calls into Python, or waits for something that might, while it has this: a finalizer holds the GIL and waits.
std::mutex mutex;
CopiesOfStorages& copies_of_storages() {
  // Never destroyed: at exit tensors may go after static objects.
  static auto* map = new CopiesOfStorages();
  return *map;
}

// For a counter whose tensors now lie in `storage`. `p.data = other` leaves p's counter as it is: should p come back to
// where it was before, that counter has not seen what was written there meanwhile.
void forget_elsewhere(const c10::VariableVersion& counter, const void* storage) {
  if (counter.unique()) return;  // no entry holds it
  for (auto& [other, copies] : copies_of_storages()) {
    if (other == storage) continue;
    for (auto& [view, entry] : copies.entries) {
      if (is_same(entry.counter, counter)) entry.counter = c10::VariableVersion();
    }
  }
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

PackArgs pack_args(const at::Tensor& weight, DType format) {
  return {weight.const_data_ptr(), dtype_of(weight), weight.size(0), weight.size(1), weight.stride(0),
          weight.stride(1),        format,           nullptr,        nullptr};
}

void pack(const at::Tensor& weight, DType format, PackedTensor& packed) {
  PackArgs args = pack_args(weight, format);
  const int64_t panels = num_panels(weight.size(0)), bytes = panels * panel_bytes(format, weight.size(1));
  // A buffer that nobody else reads any more is written again: a training step packs every weight anew.
  if (!packed.panels.defined() || packed.panels.numel() != bytes || packed.panels.use_count() > 1) {
    packed.panels = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  }
  args.packed = static_cast<char*>(packed.panels.mutable_data_ptr());
  if (format == DType::kInt8) {
    packed.channel_offsets = at::empty({panels * kPanel}, at::TensorOptions().dtype(at::kInt));
    args.channel_offset = packed.channel_offsets.mutable_data_ptr<int32_t>();
  }
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) { pack_panels(args, begin, end); });
}

// A packed weight in units of kCheckSteps of a panel, panel by panel.
int64_t units_of_panel(const at::Tensor& weight, DType format) {
  return (panel_bytes(format, weight.size(1)) + kUnitBytes - 1) / kUnitBytes;
}

// Whether the units [begin, end) are what the weight would be packed to now. Bytes are compared, not numbers: a NaN is
// itself. int8's channel offsets follow from the panels.
bool is_packed_as(const at::Tensor& weight, DType format, const PackedTensor& packed, int64_t begin, int64_t end) {
  const PackArgs whole = pack_args(weight, format);
  const int64_t units = units_of_panel(weight, format), bytes = panel_bytes(format, whole.in_features);
  const int64_t features = kCheckSteps * 4 / element_size(format);
  const auto* panels = static_cast<const char*>(packed.panels.const_data_ptr());
  alignas(64) char unit[kUnitBytes];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t panel = i / units, first = i % units;
    PackArgs args = whole;
    const int64_t from = panel * kPanel * whole.out_stride + first * features * whole.in_stride;
    args.weight = static_cast<const char*>(whole.weight) + from * element_size(whole.dtype);
    args.out_features = std::min(kPanel, whole.out_features - panel * kPanel);
    args.in_features = std::min(features, whole.in_features - first * features);
    args.packed = unit;
    pack_panels(args, 0, 1);
    const size_t count = static_cast<size_t>(panel_bytes(format, args.in_features));
    if (std::memcmp(unit, panels + panel * bytes + first * kUnitBytes, count) != 0) return false;
  }
  return true;
}

struct Found {
  bool is_known;  // the storage: else there is nothing in the rest
  PackedTensor packed;
  int64_t check_begin = 0, check_end = 0;  // units that this call is to compare
};

// The copy of `weight`, packed where it has none, has one that is seen to be old, or `anew`. Of a storage that was
// never seen before none is made unless it `is_watched`.
Found find_or_pack(const at::Tensor& weight, DType format, bool is_watched, bool anew) {
  auto* const storage = weight.storage().unsafeGetStorageImpl();
  const int64_t offset = weight.storage_offset() * weight.element_size();
  const View view{offset,           weight.size(0),       weight.size(1), weight.stride(0),
                  weight.stride(1), weight.scalar_type(), format};
  const char* const data = static_cast<const char*>(weight.const_data_ptr()) - offset;
  const c10::VariableVersion& counter = weight.unsafeGetTensorImpl()->version_counter();
  const int64_t version = counter.enabled() ? counter.current_version() : 0;
  const uint64_t sample = weight.numel() == 0 ? 0 : sample_of(weight);
  std::map<View, Entry> moved, crowded;  // freed after the lock
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = copies_of_storages().find(storage);
  if (found == copies_of_storages().end()) {
    if (!is_watched) return {false, {}};
    Copies copies{c10::weak_intrusive_ptr<c10::StorageImpl>(weight.storage().getWeakStorageImpl()), data, {}};
    found = copies_of_storages().emplace(storage, std::move(copies)).first;
  }
  Copies& copies = found->second;
  if (copies.data != data) {
    moved.swap(copies.entries);
    copies.data = data;
  }
  const auto known = copies.entries.find(view);
  if (known == copies.entries.end()) {
    static int64_t serial = 0;
    // Slices that move along a storage would otherwise add copies without end.
    int64_t bytes = weight.numel() * weight.element_size();
    for (const auto& [other, entry] : copies.entries) bytes += source_bytes(other);
    if (bytes > kMostCopies * static_cast<int64_t>(weight.storage().nbytes())) crowded.swap(copies.entries);
    // Weights begin at different places of their round, so that the work spreads over the calls.
    forget_elsewhere(counter, storage);
    Entry entry{counter, version, sample, serial++ * 633, {}};
    pack(weight, format, entry.packed);
    return {true, copies.entries.emplace(view, std::move(entry)).first->second.packed};
  }
  Entry& entry = known->second;
  const int64_t units = num_panels(weight.size(0)) * units_of_panel(weight, format), use = entry.uses++ % kCheckCalls;
  const bool has_moved = !is_same(entry.counter, counter);
  if (anew || has_moved || entry.version != version || entry.sample != sample) {
    if (has_moved) forget_elsewhere(counter, storage);
    pack(weight, format, entry.packed);
    entry.counter = counter;
    entry.version = version;
    entry.sample = sample;
    return {true, entry.packed};
  }
  if (weight.is_inference()) return {true, entry.packed, 0, units};
  return {true, entry.packed, use * units / kCheckCalls, (use + 1) * units / kCheckCalls};
}

// fastbert::`name`, whose kernel is Python, with the weight and what else it takes.
template <typename... Arguments>
void call_python(const char* name, const at::Tensor& weight, Arguments... arguments) {
  const at::AutoDispatchBelowADInplaceOrView below;
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<void(const at::Tensor&, Arguments...)>().call(
      weight, arguments...);
}

// Has Python call forget_packed when the weight's storage goes.
void watch(const at::Tensor& weight) { call_python("fastbert::watch_weight_cpu", weight); }

// Once for each `warned`.
void warn(const at::Tensor& weight, std::atomic<bool>& warned, c10::string_view message) {
  if (!warned.exchange(true)) call_python("fastbert::warn_of_weight_cpu", weight, message);
}

void check_memory(const at::Tensor& weight) {
  const int64_t last =
      weight.storage_offset() + (weight.size(0) - 1) * weight.stride(0) + (weight.size(1) - 1) * weight.stride(1);
  const size_t needed = weight.numel() == 0 ? 0 : static_cast<size_t>((last + 1) * weight.element_size());
  TORCH_CHECK(weight.storage().nbytes() >= needed, "weight needs ", needed, " bytes of storage, but its storage has ",
              weight.storage().nbytes(), ": it was resized");
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

PackedTensor packed_weight(const at::Tensor& weight, DType format) {
  check_memory(weight);
  if (weight.stride(0) != 1 && weight.stride(1) != 1) {
    PackedTensor packed;  // neither rows nor columns lie whole: of no use to the next call, which makes another copy
    pack(weight.contiguous(), format, packed);
    return packed;
  }
  Found found = find_or_pack(weight, format, /*is_watched=*/false, /*anew=*/false);
  if (!found.is_known) {
    watch(weight);
    found = find_or_pack(weight, format, /*is_watched=*/true, /*anew=*/false);
  }
  static std::atomic<bool> warned_of_write{false}, warned_of_inference{false};
  if (!weight.is_inference()) {
    if (is_packed_as(weight, format, found.packed, found.check_begin, found.check_end)) return found.packed;
    found = find_or_pack(weight, format, /*is_watched=*/true, /*anew=*/true);
    warn(weight, warned_of_write,
         "a weight was written in a way that PyTorch does not record (through .data, NumPy, DLPack, a storage, apply_, "
         "torch.distributed, or another tensor with its memory), and some calls have computed with its old values "
         "before this was found; now the new ones are used. Call fastbert.repack(model) right after such a write.");
    return found.packed;
  }
  std::atomic<bool> is_same{true};
  at::parallel_for(found.check_begin, found.check_end, 4, [&](int64_t begin, int64_t end) {
    if (!is_packed_as(weight, format, found.packed, begin, end)) is_same = false;
  });
  if (!is_same) found = find_or_pack(weight, format, /*is_watched=*/true, /*anew=*/true);
  warn(weight, warned_of_inference,
       "a weight is an inference tensor, which keeps no version: all of it is compared with its packed copy at each "
       "call, which takes longer than the product of a few rows itself. Load, convert or move the model outside of "
       "torch.inference_mode; to run it there is fine.");
  return found.packed;
}

void forget_packed(uintptr_t storage) {
  CopiesOfStorages::node_type forgotten;  // freed after the lock
  const std::lock_guard<std::mutex> lock(mutex);
  forgotten = copies_of_storages().extract(reinterpret_cast<const void*>(storage));
}

void repack(const std::vector<uintptr_t>& storages) {
  std::vector<std::map<View, Entry>> forgotten(storages.size());  // freed after the lock
  const std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < storages.size(); ++i) {
    const auto found = copies_of_storages().find(reinterpret_cast<const void*>(storages[i]));
    if (found != copies_of_storages().end()) forgotten[i].swap(found->second.entries);
  }
}

void weights_changed(const std::vector<uintptr_t>& storages) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const uintptr_t storage : storages) {
    const auto found = copies_of_storages().find(reinterpret_cast<const void*>(storage));
    if (found == copies_of_storages().end()) continue;
    for (auto& [view, entry] : found->second.entries) entry.version = -1;  // none that a tensor has
  }
}

int64_t packed_bytes() {
  const std::lock_guard<std::mutex> lock(mutex);
  int64_t bytes = 0;
  for (const auto& [storage, copies] : copies_of_storages()) {
    for (const auto& [view, entry] : copies.entries) {
      bytes += entry.packed.panels.numel();
      if (entry.packed.channel_offsets.defined()) bytes += entry.packed.channel_offsets.nbytes();
    }
  }
  return bytes;
}

}  // namespace fastbert
