// The registered pooling operator of the CPU backend; fastbert/ops/pooling.py has its schema.
#pragma once

#include <string>

#include "array.h"

namespace fastbert {

// x (total_tokens, hidden_size), cu_seqlens (batch + 1,) -> (batch, hidden_size), by mode "mean" or "cls".
Array pooling_fwd_cpu(const Array& x, const Array& cu_seqlens, const std::string& mode);

}  // namespace fastbert
