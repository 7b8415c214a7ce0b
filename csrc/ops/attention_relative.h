// The registered operators of attention with relative terms; fastbert/ops/attention/relative_cpu.py has their schemas.
#pragma once

#include <tuple>

#include "array.h"
#include "attention.h"

namespace fastbert {

// As fastbert.ops.Relative has them.
struct RelativeInputs {
  Array rows;
  OptionalArray key, query, bias, positions;
};

// A gradient of each, which is (0,) where there is no such term.
struct RelativeGradients {
  Array key, query, bias;
};

// attention_relative_fwd_cpu in inference, into `out`, of q's shape.
void attention_relative_rows(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                             const AttentionOptions& options, const RelativeInputs& relative, const Array& out);

// As attention_fwd_cpu.
std::tuple<Array, Array> attention_relative_fwd_cpu(const Array& q, const Array& k, const Array& v,
                                                    const Array& cu_seqlens, const OptionalArray& philox,
                                                    const AttentionOptions& options, const RelativeInputs& relative,
                                                    double dropout_p, bool return_stats);

// As attention_gradients.
RelativeGradients attention_relative_gradients(const Array& dout, const Array& q, const Array& k, const Array& v,
                                               const Array& out, const Array& softmax_stats, const Array& cu_seqlens,
                                               const OptionalArray& philox, const AttentionOptions& options,
                                               const RelativeInputs& relative, double dropout_p, const Array& dq,
                                               const Array& dk, const Array& dv);

// The operators, with the schemas' arguments.
std::tuple<Array, Array> attention_relative_fwd_operator(
    const Array& q, const Array& k, const Array& v, const Array& cu_seqlens, const OptionalArray& philox,
    const OptionalArray& window_positions, const OptionalArray& num_keys, const Array& rows, const OptionalArray& key,
    const OptionalArray& query, const OptionalArray& bias, const OptionalArray& positions, double softmax_scale,
    double dropout_p, int64_t window_left, int64_t window_right, bool return_stats);
std::tuple<Array, Array, Array, Array, Array, Array> attention_relative_bwd_operator(
    const Array& dout, const Array& q, const Array& k, const Array& v, const Array& out, const Array& softmax_stats,
    const Array& cu_seqlens, const OptionalArray& philox, const OptionalArray& window_positions,
    const OptionalArray& num_keys, const Array& rows, const OptionalArray& key, const OptionalArray& query,
    const OptionalArray& bias, const OptionalArray& positions, double softmax_scale, double dropout_p,
    int64_t window_left, int64_t window_right);

}  // namespace fastbert
