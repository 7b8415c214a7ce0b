#include "packed_only.h"

#if __has_include(<malloc.h>)
#include <malloc.h>
#endif

#include <memory>

#include "packed_weights.h"
#include "storages.h"
#include "workspace.h"

namespace fastbert {
namespace {

constexpr uint64_t kMagic = 0x796c6e6f6b636170u;  // "packonly": no weight of numbers begins so by chance

// What a copy's memory begins with: a cache line. Behind it are the parts, each of them its panels and, int8, their
// channels' offsets.
struct Header {
  uint64_t magic = kMagic;
  int64_t out_features, in_features, parts;
  DType format;
};
constexpr int64_t kHeaderBytes = 64;
static_assert(sizeof(Header) <= kHeaderBytes);

struct Part {
  int64_t rows, panels_bytes, bytes;

  explicit Part(const Header& header) : rows(header.out_features / header.parts) {
    const int64_t panels = num_panels(rows);
    panels_bytes = panels * panel_bytes(header.format, header.in_features);
    bytes = panels_bytes + (header.format == DType::kInt8 ? panels * kPanel * 4 : 0);
  }
};

}  // namespace

Array pack_only_cpu(const Array& weight, int64_t parts) {
  check(weight.is_cpu() && weight.dim() == 2 && weight.is_contiguous() && weight.numel() > 0, "weight has shape ",
        weight.sizes(), " on ", weight.device(), ", expected (out_features, in_features), contiguous, on cpu");
  check(parts > 0 && weight.size(0) % parts == 0, "weight has ", weight.size(0), " rows, which are no ", parts,
        " parts");
  const bool is_int8 = weight.scalar_type() == ScalarType::Char;
  const Header header{kMagic, weight.size(0), weight.size(1), parts,
                      is_int8 ? DType::kInt8 : format_for(weight.scalar_type())};
  const Part part(header);
  const std::shared_ptr<Block> block = lasting_block(kHeaderBytes + parts * part.bytes);
  *reinterpret_cast<Header*>(block->data()) = header;
  for (int64_t i = 0; i < parts; ++i) {
    PackArgs args = pack_args(weight.narrow(0, i * part.rows, part.rows), header.format);
    args.packed = block->data() + kHeaderBytes + i * part.bytes;
    if (is_int8) args.channel_offset = reinterpret_cast<int32_t*>(args.packed + part.panels_bytes);
    parallel_for(0, num_panels(part.rows), 1, [&](int64_t begin, int64_t end) { pack_panels(args, begin, end); });
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
  const char* const panels = memory + kHeaderBytes + row / part.rows * part.bytes;
  const bool is_int8 = header.format == DType::kInt8;
  return PackedOnly{header.format, panels,
                    is_int8 ? reinterpret_cast<const int32_t*>(panels + part.panels_bytes) : nullptr};
}

void give_back_freed() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace fastbert
