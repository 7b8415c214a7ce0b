// Which elements of a storage a weight has, and what tells whether they are still the same.
#pragma once

#include <cstdint>
#include <tuple>

#include "array.h"

namespace fastbert {

// Elements of a storage that a weight has: `count` lines of `length` elements that lie whole, `stride` elements apart,
// from a byte of the storage on. They are rows, or the columns of what is transposed: both have the same lines.
struct Lines {
  int64_t offset, count, length, stride;
  ScalarType dtype;

  auto key() const { return std::tie(offset, count, length, stride, dtype); }
  friend bool operator<(const Lines& a, const Lines& b) { return a.key() < b.key(); }

  int64_t nbytes() const { return count * length * element_size(dtype); }
  int64_t end() const { return offset + ((count - 1) * stride + length) * element_size(dtype); }
  bool overlaps(const Lines& other) const { return offset < other.end() && other.offset < end(); }
};

bool is_transposed(const Array& weight);

Lines lines_of(const Array& weight, const char* storage);

// storage_of a weight (storages.h). Throws where it was resized to less than the weight needs.
const char* checked_storage_of(const Array& weight);

// Of 16 of the elements.
uint64_t sample_of(const char* storage, const Lines& lines);

// Of all of them, by all threads: memory gives it as fast as it can.
uint64_t checksum_of(const char* storage, const Lines& lines);

}  // namespace fastbert
