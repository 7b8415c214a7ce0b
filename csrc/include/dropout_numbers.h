// What every backend makes of dropout's probability.
#pragma once

#include <cstdint>

namespace fastbert {

// What a random word must reach for its element to be kept, and what a kept element is multiplied by.
inline uint32_t dropout_threshold(double p) { return p < 1.0 ? static_cast<uint32_t>(p * 4294967296.0) : 4294967295u; }
inline float dropout_scale(double p) { return p < 1.0 ? static_cast<float>(1.0 / (1.0 - p)) : 0.0f; }

}  // namespace fastbert
