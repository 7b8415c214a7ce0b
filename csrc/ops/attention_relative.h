// The registered operators of attention with relative terms; fastbert/ops/_attention_relative.py has their schemas.
#pragma once

#include <tuple>

#include "array.h"
#include "attention.h"

namespace fastbert {

// As fastbert.ops.Relative has them.
struct RelativeForm {
  Array rows;
  OptionalArray key, query, bias, positions;
};

// attention_relative_fwd_cpu in inference, into `out`, of q's shape.
void attention_relative_rows(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                             const AttentionForm& form, const RelativeForm& relative, const Array& out);

std::tuple<Array, Array> attention_relative_fwd_cpu(const Array& q, const Array& k, const Array& v,
                                                    const Array& cu_seqlens, const OptionalArray& philox,
                                                    const OptionalArray& window_positions, const Array& rows,
                                                    const OptionalArray& key, const OptionalArray& query,
                                                    const OptionalArray& bias, const OptionalArray& positions,
                                                    double softmax_scale, double dropout_p, int64_t window_left,
                                                    int64_t window_right, bool return_stats);

// dq, dk, dv, and the gradients of key, query and bias, which are (0,) where there is no such term.
std::tuple<Array, Array, Array, Array, Array, Array> attention_relative_bwd_cpu(
    const Array& dout, const Array& q, const Array& k, const Array& v, const Array& out, const Array& softmax_stats,
    const Array& cu_seqlens, const OptionalArray& philox, const OptionalArray& window_positions, const Array& rows,
    const OptionalArray& key, const OptionalArray& query, const OptionalArray& bias, const OptionalArray& positions,
    double softmax_scale, double dropout_p, int64_t window_left, int64_t window_right);

}  // namespace fastbert
