// The registered pooling operators of the CPU backend; fastbert/ops/pooling.py has their schemas.
#pragma once

#include <string>
#include <tuple>

#include "array.h"

namespace fastbert {

std::tuple<Array, Array> pooling_fwd_cpu(const Array& x, const Array& cu_seqlens, const std::string& mode,
                                         bool return_ties);

Array pooling_bwd_cpu(const Array& dout, const OptionalArray& x, const OptionalArray& out, const OptionalArray& ties,
                      const Array& cu_seqlens, const std::string& mode, int64_t total_tokens);

}  // namespace fastbert
