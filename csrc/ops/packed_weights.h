// Weights packed for the GEMMs, kept for as long as the weight itself lives unchanged.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "../cpu/gemm.h"
#include "workspace.h"

namespace fastbert {

DType dtype_of(const Array& t);

// What operands are multiplied in, for results in `dtype`.
DType format_for(ScalarType dtype);

// Whether its rows or its columns lie whole.
bool has_whole_lines(const Array& weight);

// How a weight with whole lines is packed, but for the memory that it is packed to. Checks that the weight has memory.
PackArgs pack_args(const Array& weight, DType format);

// A packed weight's memory.
struct PackedMemory {
  std::shared_ptr<Block> panels;
  std::shared_ptr<Block> channel_offsets;  // int32, int8 weights only
  std::shared_ptr<Block> residuals;        // of int8 panels that were split (residuals.h)
};

// Calls with a weight within which all of its packed copy is compared with it once, a share at each call, so that a
// write that left no trace is found. Chosen so that this takes under 1 % of a forward pass of 16 tokens (docs/gemm.md).
constexpr int64_t kCheckCalls = 1024;

// How much a call compares of a weight that was not written, as torch says: all of it, by a checksum, or as much as
// kCheckCalls says. Either way 16 sampled elements.
enum class Comparison { kWhole, kShare };

// Of the calling thread's next call: a share in inference mode, and while somebody says that torch records every write
// (set_only_recorded_writes).
Comparison comparison_of_call();
void set_only_recorded_writes(bool only);
bool only_recorded_writes();

// A weight's version as torch counts it, and what stands for it where the tensor keeps none, an inference tensor.
constexpr int64_t kNoVersion = -1;
int64_t version_of(const Array& weight);

// weight (out_features, in_features) packed in `format`; `weight.t()` serves the gradient's product. A copy is packed
// where there is none yet, or where the weight has changed since:
// - `version`, what version_of gives, is another, or the weight lies elsewhere;
// - what this call compares is another. Of a weight that keeps no version every call compares all.
// All copies of what has changed are old then, in every format, transposed or not, those of parts of it too. Several
// threads may ask at once.
//
// None, and the caller packs for itself (packed_once), where no copy is the weight's and none is kept: the first call
// with a version keeps none, unless its weight is int8, the calls before it asked for one version several times, or
// its owner says that torch records every write: then ops.adamw renews the copies. may_keep: without it
// only a copy that is there is given, and none to those who would have to compare all of it.
std::optional<PackedMemory> packed_weight(const Array& weight, DType format, int64_t version, Comparison comparison,
                                          bool may_keep);

// Packed as it is now, for the caller alone, in memory that its next call with such a weight uses again.
Array packed_once(const Array& weight, DType format);

// The packed copies of a weight that is being written: the writer of some of its rows packs them while they are
// in the cache, so that the next product need not read all of the weight again.
class Renewal {
 public:
  Renewal() = default;  // of none
  // Of those copies that are the weight's as it is now, contiguous float32, and that are not read. They count as old
  // until `finish`.
  explicit Renewal(const Array& weight);

  bool empty() const { return copies_.empty(); }
  // The rows [begin, end) are written; begin is a multiple of kPanel, and so is end but for the last row.
  void pack(int64_t begin, int64_t end) const;
  // All rows are packed. The caller has torch count one more version of the weight.
  void finish() const;

 private:
  struct Copy {
    bool is_transposed;
    int64_t first_row, rows;  // of the weight: a weight may be packed in parts
    DType format;
    PackedMemory packed;
  };
  Array weight_;
  int64_t version_ = kNoVersion;
  std::vector<Copy> copies_;
};

// These take addresses of storages, `untyped_storage().data_ptr()`, and wait for a thread that is packing, which never
// waits for Python: so Python may call them at any time, a finalizer too.
// - forget_packed: for a storage that goes.
// - repack: frees the packed copies; the next call makes them again.
// - weights_changed: the next call packs anew, into the memory that is there.
void forget_packed(const void* storage);
void repack(const std::vector<uintptr_t>& storages);
void weights_changed(const std::vector<uintptr_t>& storages);

// Bytes of all packed copies that are kept.
int64_t packed_bytes();

}  // namespace fastbert
