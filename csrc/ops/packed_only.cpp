#include "packed_only.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "packed_weights.h"
#include "residuals.h"
#include "storages.h"
#include "workspace.h"

namespace fastbert {
namespace {

constexpr uint64_t kMagic = 0x796c6e6f6b636170u;  // "packonly": no weight of numbers begins so by chance

// What a copy's memory begins with: a cache line. Behind it are the parts, each of them its panels and, int8, their
// channels' offsets and residuals.
struct Header {
  uint64_t magic = kMagic;
  int64_t out_features, in_features, parts, part_bytes;
  DType format;
  bool is_split;  // of int8: for the instruction set that packed it
};
constexpr int64_t kHeaderBytes = 64;
static_assert(sizeof(Header) <= kHeaderBytes);

struct Part {
  int64_t rows, offsets_at, residuals_at;  // int8 only

  explicit Part(const Header& header) : rows(header.out_features / header.parts) {
    const int64_t panels = num_panels(rows);
    offsets_at = panels * panel_bytes(header.format, header.in_features);
    residuals_at = offsets_at + (header.format == DType::kInt8 ? panels * kPanel * 4 : 0);
  }
};

}  // namespace

Array pack_only_cpu(const Array& weight, int64_t parts) {
  check(weight.is_cpu() && weight.dim() == 2 && weight.is_contiguous() && weight.numel() > 0, "weight has shape ",
        weight.sizes(), " on ", weight.device(), ", expected (out_features, in_features), contiguous, on cpu");
  check(parts > 0 && weight.size(0) % parts == 0, "weight has ", weight.size(0), " rows, which are no ", parts,
        " parts");
  const bool is_int8 = weight.scalar_type() == ScalarType::Char;
  Header header{kMagic,
                weight.size(0),
                weight.size(1),
                parts,
                0,
                is_int8 ? DType::kInt8 : format_for(weight.scalar_type()),
                is_int8 && splits_bytes()};
  const Part part(header);
  std::vector<PackArgs> args;
  std::vector<std::vector<int32_t>> begins;
  for (int64_t i = 0; i < parts; ++i) {
    args.push_back(pack_args(weight.narrow(0, i * part.rows, part.rows), header.format));
    begins.push_back(residual_begins(args.back()));
    header.part_bytes = std::max(header.part_bytes, part.residuals_at + residual_bytes(begins.back()));
  }
  header.part_bytes = (header.part_bytes + kHeaderBytes - 1) / kHeaderBytes * kHeaderBytes;
  const std::shared_ptr<Block> block = lasting_block(kHeaderBytes + parts * header.part_bytes);
  *reinterpret_cast<Header*>(block->data()) = header;
  for (int64_t i = 0; i < parts; ++i) {
    PackArgs& of_part = args[i];
    of_part.packed = block->data() + kHeaderBytes + i * header.part_bytes;
    if (is_int8) of_part.channel_offset = reinterpret_cast<int32_t*>(of_part.packed + part.offsets_at);
    parallel_for(0, num_panels(part.rows), 1, [&](int64_t begin, int64_t end) { pack_panels(of_part, begin, end); });
    split_panels_into(of_part.packed + part.residuals_at, of_part, begins[i]);
  }
  return tensor_in(block, block->data(), {block->bytes()}, ScalarType::Byte);
}

std::optional<PackedOnly> packed_only(const Array& weight) {
  if (weight.scalar_type() != ScalarType::Byte) return std::nullopt;
  const char* const memory = storage_of(weight);
  const Header& header = *reinterpret_cast<const Header*>(memory);
  check(storage_bytes(weight) > kHeaderBytes && header.magic == kMagic,
        "weight is Byte, expected Float, BFloat16 or Char");
  const Part part(header);
  const int64_t row = weight.data<const char>() - memory;
  if (row % part.rows != 0 || weight.size(0) != part.rows || weight.size(1) != header.in_features) fail(kPackedOnly);
  const char* const panels = memory + kHeaderBytes + row / part.rows * header.part_bytes;
  if (header.format != DType::kInt8) return PackedOnly{header.format, panels, nullptr, {}};
  check(header.is_split == splits_bytes(),
        "this int8 weight was packed for another instruction set than the one in use");
  return PackedOnly{header.format, panels, reinterpret_cast<const int32_t*>(panels + part.offsets_at),
                    residuals_in(header.is_split ? panels + part.residuals_at : nullptr, part.rows)};
}

}  // namespace fastbert
