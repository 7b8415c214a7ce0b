#include "weight_lines.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../cpu/checksum.h"
#include "../cpu/gemm.h"
#include "storages.h"

namespace fastbert {
namespace {

// Bits: an unsigned integer as wide as an element.
template <typename Bits>
uint64_t sample_as(const char* storage, const Lines& lines) {
  uint64_t hash = 0, factor = 1;
  for (int64_t i = 0; i < 16; ++i) {
    const int64_t line = i * (lines.count - 1) / 15, column = (i * 7 % 16) * (lines.length - 1) / 15;
    Bits bits;
    std::memcpy(&bits, storage + lines.offset + (line * lines.stride + column) * int64_t{sizeof(Bits)}, sizeof(Bits));
    hash += bits * factor;  // no element waits for the one before it
    factor *= 0x9e3779b97f4a7c15u;
  }
  return hash;
}

}  // namespace

bool is_transposed(const Array& weight) { return weight.stride(1) != 1; }

Lines lines_of(const Array& weight, const char* storage) {
  const int64_t at = is_transposed(weight) ? 1 : 0;
  return {weight.data<const char>() - storage, weight.size(at), weight.size(1 - at), weight.stride(at),
          weight.scalar_type()};
}

const char* checked_storage_of(const Array& weight) {
  const char* const storage = storage_of(weight);
  const int64_t first = (weight.data<const char>() - storage) / weight.element_size();
  const int64_t last = first + (weight.size(0) - 1) * weight.stride(0) + (weight.size(1) - 1) * weight.stride(1);
  const int64_t needed = weight.numel() == 0 ? 0 : (last + 1) * weight.element_size(), bytes = storage_bytes(weight);
  check(bytes >= needed, "weight needs ", needed, " bytes of storage, but its storage has ", bytes, ": it was resized");
  return storage;
}

uint64_t sample_of(const char* storage, const Lines& lines) {
  const int64_t bytes = element_size(lines.dtype);
  return bytes == 4   ? sample_as<uint32_t>(storage, lines)
         : bytes == 2 ? sample_as<uint16_t>(storage, lines)
                      : sample_as<uint8_t>(storage, lines);
}

uint64_t checksum_of(const char* storage, const Lines& lines) {
  const int64_t element = element_size(lines.dtype), bytes = lines.length * element;
  const int64_t blocks = num_panels(lines.count), least = std::max<int64_t>(1, 65536 / (kPanel * bytes));
  std::vector<uint64_t> sums(static_cast<size_t>(blocks));
  parallel_for(0, blocks, least, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t line = block * kPanel, stride = lines.stride * element;
      sums[static_cast<size_t>(block)] =
          checksum(storage + lines.offset + line * stride, std::min(kPanel, lines.count - line), bytes, stride);
    }
  });
  uint64_t sum = 0;
  for (const uint64_t x : sums) sum = mixed(sum, x);
  return sum;
}

}  // namespace fastbert
