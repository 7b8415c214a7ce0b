// The registered operators of attention with relative terms; fastbert/ops/_attention_relative.py has their schemas.
#pragma once

#include <tuple>

#include "array.h"

namespace fastbert {

std::tuple<Array, Array> attention_relative_fwd_cpu(const Array& q, const Array& k, const Array& v,
                                                    const Array& cu_seqlens, const OptionalArray& philox,
                                                    const OptionalArray& window_positions, const Array& rows,
                                                    const OptionalArray& key, const OptionalArray& query,
                                                    const OptionalArray& bias, const OptionalArray& positions,
                                                    double softmax_scale, double dropout_p, int64_t window_left,
                                                    int64_t window_right, bool return_stats);

}  // namespace fastbert
