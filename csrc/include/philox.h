// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): four words from a counter and a
// key.
#pragma once

#include <cstdint>

#include "inline.h"

namespace fastbert {

constexpr uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u, kPhiloxKeyStep1 = 0xBB67AE85u;

struct Philox4 {
  uint32_t w0, w1, w2, w3;
};

// Recursion, so that a loop over counters is straight-line code and vectorises.
template <int kRounds>
FASTBERT_INLINE Philox4 philox_rounds(Philox4 c, uint32_t k0, uint32_t k1) {
  if constexpr (kRounds == 0) {
    return c;
  } else {
    const uint64_t a = uint64_t{kPhiloxFactor0} * c.w0;
    const uint64_t b = uint64_t{kPhiloxFactor1} * c.w2;
    const Philox4 next{static_cast<uint32_t>(b >> 32) ^ c.w1 ^ k0, static_cast<uint32_t>(b),
                       static_cast<uint32_t>(a >> 32) ^ c.w3 ^ k1, static_cast<uint32_t>(a)};
    return philox_rounds<kRounds - 1>(next, k0 + kPhiloxKeyStep0, k1 + kPhiloxKeyStep1);
  }
}

FASTBERT_INLINE Philox4 philox4x32_10(uint64_t counter_low, uint64_t counter_high, uint64_t key) {
  const Philox4 counter{static_cast<uint32_t>(counter_low), static_cast<uint32_t>(counter_low >> 32),
                        static_cast<uint32_t>(counter_high), static_cast<uint32_t>(counter_high >> 32)};
  return philox_rounds<10>(counter, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
}

}  // namespace fastbert
