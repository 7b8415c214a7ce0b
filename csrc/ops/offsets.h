// Where the sequences of a packed batch begin.
#pragma once

#include "array.h"

namespace fastbert {

// cu_seqlens, int32 (batch + 1,), whole in memory: from 0 on, never falling, and nowhere beyond total_tokens.
Array checked_offsets(const Array& cu_seqlens, int64_t total_tokens);

}  // namespace fastbert
