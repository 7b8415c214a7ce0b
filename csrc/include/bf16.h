// bfloat16 storage and its conversions, in integer arithmetic that vectorises on every ISA.
#pragma once

#include <cstdint>

#include "isa.h"

namespace fastbert {

struct BFloat16 {
  uint16_t bits;
};

FASTBERT_INLINE float to_float(float value) { return value; }

FASTBERT_INLINE float to_float(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float out;
  __builtin_memcpy(&out, &bits, sizeof(out));
  return out;
}

template <typename T>
T from_float(float value);

template <>
FASTBERT_INLINE float from_float<float>(float value) {
  return value;
}

template <>
FASTBERT_INLINE BFloat16 from_float<BFloat16>(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  const uint32_t nearest_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // Rounding could carry a NaN's payload into the sign and make it zero: NaN is set by hand.
  const uint32_t nan = 0x7fc0u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : nearest_even)};
}

}  // namespace fastbert
