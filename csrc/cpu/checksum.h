// By which to see whether memory is still what it was.
#pragma once

#include <cstdint>

namespace fastbert {

// Of `lines` lines of `bytes` each, `stride` bytes apart. A change of one 32-bit word always gives another number; any
// other change gives the same one with a chance of 2^-32 at most, that of numbers drawn at random. Instruction sets
// have numbers of their own.
uint64_t checksum(const char* memory, int64_t lines, int64_t bytes, int64_t stride);

// `sum` with one more number: for one `sum` another `x` always gives another result, and the other way round.
inline uint64_t mixed(uint64_t sum, uint64_t x) {
  sum = (sum ^ x) * 0x9e3779b97f4a7c15u;
  return sum ^ sum >> 32;
}

}  // namespace fastbert
