#include "packed_weights.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "register.h"
#include "residuals.h"
#include "storages.h"
#include "weight_lines.h"

namespace fastbert {
namespace {

// Steps of a panel that are compared at a time: 16 KB. Whole blocks of the packing code, which then does to each
// element what it did when it packed all of them.
constexpr int64_t kCheckSteps = 64;
constexpr int64_t kUnitBytes = kCheckSteps * kPanel * 4;

// Copies of each byte of a storage: two formats, each of them transposed, of layers' weights and of a merged one.
constexpr int64_t kMostCopies = 8;

// How a weight is packed, and where its copies have that one: not by a look-up, which each product of a short text
// would wait for (docs/gemm.md).
struct Packing {
  static constexpr size_t kCount = 6;

  bool is_transposed;
  DType format;

  static Packing at(size_t i) { return {i >= kCount / 2, static_cast<DType>(i % (kCount / 2))}; }
  size_t index() const { return (is_transposed ? kCount / 2 : 0) + static_cast<size_t>(format); }
};

struct Copy {
  bool is_met = false;    // by a call
  bool is_old = true;     // not, or no more, what the weight is
  bool is_asked = false;  // of this version, by a call that got none
  int64_t uses = 0;
  PackedMemory packed;
};

// What is known of a weight, and its copies. Those that are not old are of `version`, and of the same elements.
struct Weight {
  int64_t version = kNoVersion - 1;  // none that a tensor has
  uint64_t sample = 0;
  std::optional<uint64_t> checksum;                // of this version, if it has been taken
  bool is_compared = false, was_compared = false;  // whether a call has asked for it; for that of the version before
  std::array<Copy, Packing::kCount> copies;        // of each packing

  void set_old() {
    for (Copy& copy : copies) copy.is_old = true;
  }
  int64_t num_copies() const {
    return std::count_if(copies.begin(), copies.end(), [](const Copy& copy) { return copy.is_met; });
  }
};

// By the address of a storage's memory, and in it by what they lie in.
using Weights = std::map<Lines, Weight>;
using WeightsOfStorages = std::unordered_map<const void*, Weights>;

// Nothing calls into Python, or waits for something that might, while it has this: a finalizer holds the GIL and waits.
std::mutex mutex;
WeightsOfStorages& weights_of_storages() {
  // Never destroyed: at exit tensors may go after static objects.
  static auto* map = new WeightsOfStorages();
  return *map;
}

const KeptBeside kept_beside(forget_packed);

thread_local bool records_all_writes = false;

void pack(const Array& weight, DType format, PackedMemory& packed) {
  PackArgs args = pack_args(weight, format);
  const int64_t panels = num_panels(weight.size(0)), bytes = panels * panel_bytes(format, weight.size(1));
  // A buffer that nothing else reads any more is written again: a training step packs every weight anew.
  if (packed.panels.use_count() != 1 || packed.panels->bytes() != bytes) packed.panels = lasting_block(bytes);
  args.packed = packed.panels->data();
  if (format == DType::kInt8) {
    packed.channel_offsets = lasting_block(panels * kPanel * 4);
    args.channel_offset = reinterpret_cast<int32_t*>(packed.channel_offsets->data());
  }
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) { pack_panels(args, begin, end); });
  const std::vector<int32_t> begins = residual_begins(args);
  packed.residuals = begins.empty() ? nullptr : lasting_block(residual_bytes(begins));
  if (packed.residuals != nullptr) split_panels_into(packed.residuals->data(), args, begins);
}

// A packed weight in units of kCheckSteps of a panel, panel by panel.
int64_t units_of_panel(const Array& weight, DType format) {
  return (panel_bytes(format, weight.size(1)) + kUnitBytes - 1) / kUnitBytes;
}

// Whether the units [begin, end) are what the weight would be packed to now. Bytes are compared, not numbers: a NaN is
// itself. int8's channel offsets and residuals follow from the weight.
bool is_packed_as(const Array& weight, DType format, const PackedMemory& packed, int64_t begin, int64_t end) {
  if (begin == end) return true;
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
    const int64_t count = panel_bytes(format, args.in_features);
    if (packed.residuals != nullptr) split_panels(unit, count / (kPanel * 4), 0, 1, nullptr, nullptr);
    if (std::memcmp(unit, panels + panel * bytes + first * kUnitBytes, static_cast<size_t>(count)) != 0) return false;
  }
  return true;
}

// What packed_weight is asked for.
struct Request {
  const Array& weight;
  const char* storage;
  Lines lines;
  Packing packing;
  int64_t version;
  Comparison comparison;
  bool may_keep;
  std::optional<uint64_t> checksum;  // of the weight as it is now, where it had to be taken
  bool has_changed = false;          // as the caller has seen
};

struct Lookup {
  enum What { kCopy, kNone, kNeedsChecksum };

  What what;  // with kNeedsChecksum the caller is to take the weight's checksum, and to ask again
  PackedMemory packed{};
  int64_t check_begin = 0, check_end = 0;  // units that this call is to compare
};

bool has_copy(const Weights& weights, const Request& asked) {
  const auto known = weights.find(asked.lines);
  if (known == weights.end() || asked.version == kNoVersion || known->second.version != asked.version) return false;
  return !known->second.copies[asked.packing.index()].is_old;
}

// The copy of a weight, packed where it has none, or one that is old, and where it is to be kept. Nothing is found in a
// storage of which nothing is known, unless it `is_watched`: from the first weight on it must be.
std::optional<Lookup> find_or_pack(const Request& asked, bool is_watched) {
  const Array& weight = asked.weight;
  Weights crowded;  // freed after the lock
  const std::lock_guard<std::mutex> lock(mutex);
  auto of_storage = weights_of_storages().find(asked.storage);
  const bool is_known = of_storage != weights_of_storages().end();
  if (!asked.may_keep && !(is_known && has_copy(of_storage->second, asked))) return Lookup{Lookup::kNone};
  if (!is_known) {
    if (!is_watched) return std::nullopt;
    of_storage = weights_of_storages().try_emplace(asked.storage).first;
  }
  Weights& weights = of_storage->second;
  Weight* known = &weights[asked.lines];
  const size_t packing = asked.packing.index();
  if (!known->copies[packing].is_met) {
    static int64_t serial = 0;
    // Slices that move along a storage would otherwise add copies without end.
    int64_t bytes = asked.lines.nbytes();
    for (const auto& [lines, other] : weights) bytes += other.num_copies() * lines.nbytes();
    if (bytes > kMostCopies * storage_bytes(weight)) {
      crowded.swap(weights);
      known = &weights[asked.lines];
    }
    // Weights begin at different places of their round, so that the work spreads over the calls.
    known->copies[packing].is_met = true;
    known->copies[packing].uses = serial++ * 633;
  }
  const auto set_sample = [&] { known->sample = sample_of(asked.storage, asked.lines); };
  if (known->version != asked.version) {
    known->set_old();
    for (Copy& copy : known->copies) copy.is_asked = false;
    known->version = asked.version;
    known->checksum = std::nullopt;
    known->was_compared = std::exchange(known->is_compared, false);
    set_sample();
  }
  const bool is_whole = asked.comparison == Comparison::kWhole;
  const bool differs = asked.has_changed || (asked.checksum.has_value() && known->checksum != asked.checksum) ||
                       (!is_whole && known->sample != sample_of(asked.storage, asked.lines));
  if (differs) {
    for (auto& [lines, other] : weights) {
      if (lines.overlaps(asked.lines)) other.set_old();
    }
    known->checksum = asked.checksum;
    set_sample();
  }
  Copy& copy = known->copies[packing];
  // For another instruction set, which tests change to.
  copy.is_old |= asked.packing.format == DType::kInt8 && (copy.packed.residuals != nullptr) != splits_bytes();
  // A copy is kept where more calls are likely to ask for it: not where an optimizer writes the weight behind each call
  // with it, nor of what is multiplied once. fastbert.ops.adamw renews those that are there.
  const bool asked_again = copy.is_old && copy.is_asked;
  const bool has_more = asked_again || known->was_compared;
  if (copy.is_old && !has_more && !records_all_writes && asked.packing.format != DType::kInt8) {
    copy.is_asked = true;
    return Lookup{Lookup::kNone};
  }
  // Packing takes a checksum where it is likely to be asked for; and where there is one, because what is packed beside
  // others must be the same as they are.
  known->is_compared |= is_whole && (asked_again || !copy.is_old);
  const bool takes_one =
      copy.is_old ? known->checksum.has_value() || known->was_compared || (is_whole && asked_again) : is_whole;
  if (takes_one && !asked.checksum.has_value()) return Lookup{Lookup::kNeedsChecksum};
  if (copy.is_old) {
    pack(weight, asked.packing.format, copy.packed);
    copy.is_old = false;
    return Lookup{Lookup::kCopy, copy.packed};
  }
  if (is_whole) return Lookup{Lookup::kCopy, copy.packed};
  const int64_t units = num_panels(weight.size(0)) * units_of_panel(weight, asked.packing.format);
  const int64_t use = copy.uses++ % kCheckCalls;
  return Lookup{Lookup::kCopy, copy.packed, use * units / kCheckCalls, (use + 1) * units / kCheckCalls};
}

// Once for each `warned`, through Python's filters.
void warn(const Array& weight, std::atomic<bool>& warned, const std::string& message) {
  if (warned.exchange(true)) return;
  StringHandle text = nullptr;
  call(torch_new_string_handle(message.data(), message.size(), &text), "a new string");
  StableIValue stack[] = {torch::stable::detail::from(new_handle(weight.handle())), torch::stable::detail::from(text)};
  check(call_python("fastbert::warn_of_weight_cpu", stack), message);  // a filter has made it an error
}

template <typename T>
T ask(const char* name, const Array& weight) {
  StableIValue stack[] = {torch::stable::detail::from(new_handle(weight.handle()))};
  call(torch_call_dispatcher(name, "", stack, TORCH_ABI_VERSION), name);
  return torch::stable::detail::to<T>(stack[0]);
}

}  // namespace

DType format_for(ScalarType dtype) {
  return dtype == ScalarType::BFloat16 && has_bf16_dot() ? DType::kBFloat16 : DType::kFloat32;
}

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

bool has_whole_lines(const Array& weight) { return weight.stride(0) == 1 || weight.stride(1) == 1; }

PackArgs pack_args(const Array& weight, DType format) {
  checked_storage_of(weight);
  return {weight.data(),    dtype_of(weight), weight.size(0), weight.size(1), weight.stride(0),
          weight.stride(1), format,           nullptr,        nullptr};
}

int64_t version_of(const Array& weight) {
  return ask<bool>("aten::is_inference", weight) ? kNoVersion : ask<int64_t>("aten::_version", weight);
}

Comparison comparison_of_call() {
  if (records_all_writes) return Comparison::kShare;
  // What is made in inference mode is an inference tensor: torch's stable ABI has no other way to ask.
  return ask<bool>("aten::is_inference", empty({0}, ScalarType::Float)) ? Comparison::kShare : Comparison::kWhole;
}

void set_only_recorded_writes(bool only) { records_all_writes = only; }

bool only_recorded_writes() { return records_all_writes; }

std::optional<PackedMemory> packed_weight(const Array& weight, DType format, int64_t version, Comparison comparison,
                                          bool may_keep) {
  const char* const storage = checked_storage_of(weight);
  if (weight.numel() == 0 || !has_whole_lines(weight)) {
    PackedMemory packed;  // neither rows nor columns lie whole: of no use to the next call, which makes another copy
    pack(contiguous(weight), format, packed);
    return packed;
  }
  if (!may_keep && (comparison == Comparison::kWhole || version == kNoVersion)) return std::nullopt;
  static std::atomic<bool> warned_of_write{false}, warned_of_inference{false};
  if (version == kNoVersion && comparison == Comparison::kShare) {
    warn(weight, warned_of_inference,
         "a weight is an inference tensor, which keeps no version: all of it is compared with its packed copy at each "
         "call, which takes as long as the product of a few rows itself. Load, convert or move the model outside of "
         "torch.inference_mode; to run it there is fine.");
    comparison = Comparison::kWhole;
  }
  Request asked{weight,   storage,     lines_of(weight, storage), {is_transposed(weight), format}, version, comparison,
                may_keep, std::nullopt};
  const auto find = [&]() -> Lookup {
    std::optional<Lookup> lookup = find_or_pack(asked, false);
    if (!lookup.has_value()) {
      watch_storage(weight);
      lookup = find_or_pack(asked, true);
    }
    if (lookup->what == Lookup::kNeedsChecksum) {
      asked.checksum = checksum_of(storage, asked.lines);
      lookup = find_or_pack(asked, true);
    }
    return std::move(*lookup);
  };
  Lookup lookup = find();
  if (lookup.what == Lookup::kNone) return std::nullopt;
  if (is_packed_as(weight, format, lookup.packed, lookup.check_begin, lookup.check_end))
    return std::move(lookup.packed);
  asked.has_changed = true;
  lookup = find();
  warn(weight, warned_of_write,
       "a weight was written in a way that PyTorch does not record (through .data, NumPy, DLPack, a storage, apply_, "
       "torch.distributed, or another tensor with its memory), and some calls in inference mode have computed with its "
       "old values before this was found; now the new ones are used. Call fastbert.repack(model) right after such a "
       "write.");
  if (lookup.what == Lookup::kNone) return std::nullopt;
  return std::move(lookup.packed);
}

Array packed_once(const Array& weight, DType format) {
  const int64_t panels = num_panels(weight.size(0));
  const Array packed = panels_workspace(panels * panel_bytes(format, weight.size(1)));
  PackArgs args = pack_args(weight, format);
  args.packed = packed.data<char>();
  parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) { pack_panels(args, begin, end); });
  return packed;
}

Renewal::Renewal(const Array& weight) : weight_(weight) {
  if (weight.dim() != 2 || weight.numel() == 0) return;
  const char* const storage = storage_of(weight);
  const int64_t rows = weight.size(0), columns = weight.size(1), row_bytes = columns * weight.element_size();
  const int64_t first = weight.data<const char>() - storage;
  version_ = version_of(weight);
  if (version_ == kNoVersion) return;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto entry = weights_of_storages().find(storage);
  if (entry == weights_of_storages().end()) return;
  for (auto& [lines, known] : entry->second) {
    const int64_t from = (lines.offset - first) / row_bytes;
    const bool has_rows = lines.length == columns && lines.stride == columns && lines.dtype == ScalarType::Float &&
                          lines.offset >= first && (lines.offset - first) % row_bytes == 0 && from % kPanel == 0 &&
                          from + lines.count <= rows;
    if (!has_rows || known.version != version_) continue;
    for (size_t i = 0; i < Packing::kCount; ++i) {
      auto& copy = known.copies[i];
      if (!copy.is_old && copy.packed.panels.use_count() == 1) {
        const auto [is_transposed, format] = Packing::at(i);
        copies_.push_back({is_transposed, from, lines.count, format, copy.packed});
      }
      copy.is_old = true;
    }
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
  const char* const storage = storage_of(weight_);
  const auto entry = weights_of_storages().find(storage);
  if (entry == weights_of_storages().end()) return;
  for (auto& [lines, known] : entry->second) {
    for (auto& copy : known.copies) {
      const auto is_it = [&](const Copy& renewed) { return renewed.packed.panels == copy.packed.panels; };
      if (std::none_of(copies_.begin(), copies_.end(), is_it)) continue;
      copy.is_old = false;
      known.version = version_ + 1;
      known.checksum = std::nullopt;
      known.sample = sample_of(storage, lines);
    }
  }
}

void forget_packed(const void* storage) {
  WeightsOfStorages::node_type forgotten;  // freed after the lock
  const std::lock_guard<std::mutex> lock(mutex);
  forgotten = weights_of_storages().extract(storage);
}

void repack(const std::vector<uintptr_t>& storages) {
  std::vector<Weights> forgotten(storages.size());  // freed after the lock
  const std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < storages.size(); ++i) {
    const auto entry = weights_of_storages().find(reinterpret_cast<const void*>(storages[i]));
    if (entry != weights_of_storages().end()) forgotten[i].swap(entry->second);
  }
}

void weights_changed(const std::vector<uintptr_t>& storages) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const uintptr_t storage : storages) {
    const auto entry = weights_of_storages().find(reinterpret_cast<const void*>(storage));
    if (entry == weights_of_storages().end()) continue;
    for (auto& [lines, known] : entry->second) known.version = kNoVersion - 1;  // none that a tensor has
  }
}

int64_t packed_bytes() {
  const std::lock_guard<std::mutex> lock(mutex);
  int64_t bytes = 0;
  for (const auto& [storage, weights] : weights_of_storages()) {
    for (const auto& [lines, known] : weights) {
      for (const auto& copy : known.copies) {
        if (copy.packed.panels != nullptr) bytes += copy.packed.panels->bytes();
        if (copy.packed.channel_offsets != nullptr) bytes += copy.packed.channel_offsets->bytes();
        if (copy.packed.residuals != nullptr) bytes += copy.packed.residuals->bytes();
      }
    }
  }
  return bytes;
}

}  // namespace fastbert
