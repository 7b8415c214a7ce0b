#include "packed_weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>

#include "register.h"
#include "storages.h"

namespace fastbert {
namespace {

// Steps of a panel that are compared at a time: 16 KB. Whole blocks of the packing code, which then does to each
// element what it did when it packed all of them.
constexpr int64_t kCheckSteps = 64;
constexpr int64_t kUnitBytes = kCheckSteps * kPanel * 4;

// One view of one storage: the same weight may be packed in two formats, and transposed, and a storage may hold many.
using View = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, ScalarType, DType>;

int64_t source_bytes(const View& view) {
  return std::get<1>(view) * std::get<2>(view) * element_size(std::get<5>(view));
}

// Copies of each byte of a storage: two formats, each of them transposed, of layers' weights and of a merged one.
constexpr int64_t kMostCopies = 8;

struct Entry {
  int64_t version;
  uint64_t sample;
  int64_t uses;
  PackedMemory packed;
};

// By the address of a storage's memory, and in it by view.
using CopiesOfStorages = std::unordered_map<const void*, std::map<View, Entry>>;

// Nothing calls into Python, or waits for something that might, while it has this: a finalizer holds the GIL and waits.
std::mutex mutex;
CopiesOfStorages& copies_of_storages() {
  // Never destroyed: at exit tensors may go after static objects.
  static auto* map = new CopiesOfStorages();
  return *map;
}

// Bits: an unsigned integer as wide as an element.
template <typename Bits>
uint64_t sample_as(const Array& weight) {
  const auto* bytes = weight.data<const char>();
  const int64_t out = weight.size(0), in = weight.size(1), row_stride = weight.stride(0), stride = weight.stride(1);
  uint64_t hash = 0, factor = 1;
  for (int64_t i = 0; i < 16; ++i) {
    const int64_t row = i * (out - 1) / 15, column = (i * 7 % 16) * (in - 1) / 15;
    Bits bits;
    std::memcpy(&bits, bytes + (row * row_stride + column * stride) * int64_t{sizeof(Bits)}, sizeof(Bits));
    hash += bits * factor;  // no element waits for the one before it
    factor *= 0x9e3779b97f4a7c15u;
  }
  return hash;
}

uint64_t sample_of(const Array& weight) {
  if (weight.numel() == 0) return 0;
  return weight.element_size() == 4   ? sample_as<uint32_t>(weight)
         : weight.element_size() == 2 ? sample_as<uint16_t>(weight)
                                      : sample_as<uint8_t>(weight);
}

PackArgs pack_args(const Array& weight, DType format) {
  return {weight.data(),    dtype_of(weight), weight.size(0), weight.size(1), weight.stride(0),
          weight.stride(1), format,           nullptr,        nullptr};
}

void pack(const Array& weight, DType format, PackedMemory& packed) {
  PackArgs args = pack_args(weight, format);
  const int64_t panels = num_panels(weight.size(0)), bytes = panels * panel_bytes(format, weight.size(1));
  // A buffer that nobody else reads any more is written again: a training step packs every weight anew.
  if (packed.panels.use_count() != 1 || packed.panels->bytes() != bytes) packed.panels = new_block(bytes);
  args.packed = packed.panels->data();
  if (format == DType::kInt8) {
    packed.channel_offsets = new_block(panels * kPanel * 4);
    args.channel_offset = reinterpret_cast<int32_t*>(packed.channel_offsets->data());
  }
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) { pack_panels(args, begin, end); });
}

// A packed weight in units of kCheckSteps of a panel, panel by panel.
int64_t units_of_panel(const Array& weight, DType format) {
  return (panel_bytes(format, weight.size(1)) + kUnitBytes - 1) / kUnitBytes;
}

// Whether the units [begin, end) are what the weight would be packed to now. Bytes are compared, not numbers: a NaN is
// itself. int8's channel offsets follow from the panels.
bool is_packed_as(const Array& weight, DType format, const PackedMemory& packed, int64_t begin, int64_t end) {
  const PackArgs whole = pack_args(weight, format);
  const int64_t units = units_of_panel(weight, format), bytes = panel_bytes(format, whole.in_features);
  const int64_t features = kCheckSteps * 4 / element_size(format);
  const auto* panels = packed.panels->data();
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
  PackedMemory packed;
  int64_t check_begin = 0, check_end = 0;  // units that this call is to compare
};

// The copy of `weight`, packed where it has none, has one that is seen to be old, or `anew`. Nothing is found in a
// storage for which nothing is kept, unless it `is_watched`: from the first copy on it must be.
std::optional<Found> find_or_pack(const Array& weight, const char* storage, DType format, int64_t version, bool anew,
                                  bool is_watched) {
  const View view{weight.data<const char>() - storage,
                  weight.size(0),
                  weight.size(1),
                  weight.stride(0),
                  weight.stride(1),
                  weight.scalar_type(),
                  format};
  const uint64_t sample = sample_of(weight);
  std::map<View, Entry> crowded;  // freed after the lock
  const std::lock_guard<std::mutex> lock(mutex);
  auto of_storage = copies_of_storages().find(storage);
  if (of_storage == copies_of_storages().end()) {
    if (!is_watched) return std::nullopt;
    of_storage = copies_of_storages().try_emplace(storage).first;
  }
  std::map<View, Entry>& entries = of_storage->second;
  const auto known = entries.find(view);
  if (known == entries.end()) {
    static int64_t serial = 0;
    // Slices that move along a storage would otherwise add copies without end.
    int64_t bytes = weight.nbytes();
    for (const auto& [other, entry] : entries) bytes += source_bytes(other);
    if (bytes > kMostCopies * storage_bytes(weight)) crowded.swap(entries);
    // Weights begin at different places of their round, so that the work spreads over the calls.
    Entry entry{version, sample, serial++ * 633, {}};
    pack(weight, format, entry.packed);
    return Found{entries.emplace(view, std::move(entry)).first->second.packed};
  }
  Entry& entry = known->second;
  const int64_t units = num_panels(weight.size(0)) * units_of_panel(weight, format), use = entry.uses++ % kCheckCalls;
  if (anew || entry.version != version || entry.sample != sample) {
    pack(weight, format, entry.packed);
    entry.version = version;
    entry.sample = sample;
    return Found{entry.packed};
  }
  if (version == kNoVersion) return Found{entry.packed, 0, units};
  return Found{entry.packed, use * units / kCheckCalls, (use + 1) * units / kCheckCalls};
}

// Once for each `warned`, through Python's filters.
void warn(const Array& weight, std::atomic<bool>& warned, const std::string& message) {
  if (warned.exchange(true)) return;
  StringHandle text = nullptr;
  call(torch_new_string_handle(message.data(), message.size(), &text), "a new string");
  StableIValue stack[] = {torch::stable::detail::from(new_handle(weight.handle())), torch::stable::detail::from(text)};
  check(call_python("fastbert::warn_of_weight_cpu", stack), message);  // a filter has made it an error
}

void check_memory(const Array& weight, const char* storage) {
  const int64_t first = (weight.data<const char>() - storage) / weight.element_size();
  const int64_t last = first + (weight.size(0) - 1) * weight.stride(0) + (weight.size(1) - 1) * weight.stride(1);
  const int64_t needed = weight.numel() == 0 ? 0 : (last + 1) * weight.element_size(), bytes = storage_bytes(weight);
  check(bytes >= needed, "weight needs ", needed, " bytes of storage, but its storage has ", bytes, ": it was resized");
}

template <typename T>
T ask(const char* name, const Array& weight) {
  StableIValue stack[] = {torch::stable::detail::from(new_handle(weight.handle()))};
  call(torch_call_dispatcher(name, "", stack, TORCH_ABI_VERSION), name);
  return torch::stable::detail::to<T>(stack[0]);
}

}  // namespace

DType dtype_of(const Array& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Char:
      return DType::kInt8;
    default:
      fail("dtype is ", t.scalar_type(), ", expected Float, BFloat16 or Char");
  }
}

int64_t version_of(const Array& weight) {
  return ask<bool>("aten::is_inference", weight) ? kNoVersion : ask<int64_t>("aten::_version", weight);
}

PackedMemory packed_weight(const Array& weight, DType format, int64_t version) {
  const char* const storage = storage_of(weight);
  check_memory(weight, storage);
  if (weight.numel() == 0 || (weight.stride(0) != 1 && weight.stride(1) != 1)) {
    PackedMemory packed;  // neither rows nor columns lie whole: of no use to the next call, which makes another copy
    pack(contiguous(weight), format, packed);
    return packed;
  }
  const auto find = [&](bool anew, bool is_watched) {
    return find_or_pack(weight, storage, format, version, anew, is_watched);
  };
  std::optional<Found> found = find(false, false);
  if (!found.has_value()) {
    watch_storage(weight);
    found = find(false, true);
  }
  static std::atomic<bool> warned_of_write{false}, warned_of_inference{false};
  if (version != kNoVersion) {
    if (is_packed_as(weight, format, found->packed, found->check_begin, found->check_end)) {
      return std::move(found->packed);
    }
    found = find(true, true);
    warn(weight, warned_of_write,
         "a weight was written in a way that PyTorch does not record (through .data, NumPy, DLPack, a storage, apply_, "
         "torch.distributed, or another tensor with its memory), and some calls have computed with its old values "
         "before this was found; now the new ones are used. Call fastbert.repack(model) right after such a write.");
    return std::move(found->packed);
  }
  std::atomic<bool> is_same{true};
  parallel_for(found->check_begin, found->check_end, 4, [&](int64_t begin, int64_t end) {
    if (!is_packed_as(weight, format, found->packed, begin, end)) is_same = false;
  });
  if (!is_same) found = find(true, true);
  warn(weight, warned_of_inference,
       "a weight is an inference tensor, which keeps no version: all of it is compared with its packed copy at each "
       "call, which takes longer than the product of a few rows itself. Load, convert or move the model outside of "
       "torch.inference_mode; to run it there is fine.");
  return std::move(found->packed);
}

Renewal::Renewal(const Array& weight) : weight_(weight) {
  if (weight.dim() != 2 || weight.numel() == 0) return;
  const char* const storage = storage_of(weight);
  const int64_t rows = weight.size(0), columns = weight.size(1), row_bytes = columns * weight.element_size();
  const int64_t first = weight.data<const char>() - storage;
  version_ = version_of(weight);
  if (version_ == kNoVersion) return;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = copies_of_storages().find(storage);
  if (found == copies_of_storages().end()) return;
  for (auto& [view, entry] : found->second) {
    const auto [offset, out, in, out_stride, in_stride, dtype, format] = view;
    const bool is_straight = in_stride == 1 && out_stride == columns && in == columns;
    const bool is_transposed = out_stride == 1 && in_stride == columns && out == columns;
    const int64_t from = (offset - first) / row_bytes, count = is_straight ? out : in;
    const bool has_rows = (is_straight || is_transposed) && dtype == ScalarType::Float && offset >= first &&
                          (offset - first) % row_bytes == 0 && from % kPanel == 0 && from + count <= rows;
    if (!has_rows || entry.version != version_ || entry.packed.panels.use_count() != 1) continue;
    copies_.push_back({!is_straight, from, count, format, entry.packed});
    entry.version = kNoVersion - 1;
  }
}

void Renewal::pack(int64_t begin, int64_t end) const {
  const int64_t columns = weight_.size(1);
  for (const Copy& copy : copies_) {
    const int64_t row = std::max(begin, copy.first_row), rows = std::min(end, copy.first_row + copy.rows) - row;
    if (rows <= 0) continue;
    const int64_t within = row - copy.first_row;
    const auto* weight = weight_.data<const float>() + row * columns;
    char* const panels = copy.packed.panels->data();
    PackArgs args{weight, DType::kFloat32, rows, columns, columns, 1, copy.format, panels, nullptr, true};
    if (!copy.is_transposed) {
      args.packed = panels + within / kPanel * panel_bytes(copy.format, columns);
      pack_panels(args, 0, num_panels(rows));
      continue;
    }
    // These rows are some steps of every panel.
    std::swap(args.out_stride, args.in_stride);
    args.in_features = rows;
    for (int64_t p = 0; p < num_panels(columns); ++p) {
      args.weight = weight + p * kPanel;
      args.out_features = std::min(kPanel, columns - p * kPanel);
      args.packed = panels + p * panel_bytes(copy.format, copy.rows) + panel_bytes(copy.format, within);
      pack_panels(args, 0, 1);
    }
  }
}

void Renewal::finish() const {
  if (empty()) return;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = copies_of_storages().find(storage_of(weight_));
  if (found == copies_of_storages().end()) return;
  for (auto& [view, entry] : found->second) {
    for (const Copy& copy : copies_) {
      if (copy.packed.panels != entry.packed.panels) continue;
      const Array part = weight_.narrow(0, copy.first_row, copy.rows);
      entry.sample = sample_of(copy.is_transposed ? part.t() : part);
      entry.version = version_ + 1;
    }
  }
}

void forget_packed(const void* storage) {
  CopiesOfStorages::node_type forgotten;  // freed after the lock
  const std::lock_guard<std::mutex> lock(mutex);
  forgotten = copies_of_storages().extract(storage);
}

void repack(const std::vector<uintptr_t>& storages) {
  std::vector<std::map<View, Entry>> forgotten(storages.size());  // freed after the lock
  const std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < storages.size(); ++i) {
    const auto found = copies_of_storages().find(reinterpret_cast<const void*>(storages[i]));
    if (found != copies_of_storages().end()) forgotten[i].swap(found->second);
  }
}

void weights_changed(const std::vector<uintptr_t>& storages) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const uintptr_t storage : storages) {
    const auto found = copies_of_storages().find(reinterpret_cast<const void*>(storage));
    if (found == copies_of_storages().end()) continue;
    for (auto& [view, entry] : found->second) entry.version = kNoVersion - 1;  // none that a tensor has
  }
}

int64_t packed_bytes() {
  const std::lock_guard<std::mutex> lock(mutex);
  int64_t bytes = 0;
  for (const auto& [storage, entries] : copies_of_storages()) {
    for (const auto& [view, entry] : entries) {
      bytes += entry.packed.panels->bytes();
      if (entry.packed.channel_offsets != nullptr) bytes += entry.packed.channel_offsets->bytes();
    }
  }
  return bytes;
}

}  // namespace fastbert
