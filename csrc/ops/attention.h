// The registered attention operators of the CPU backend; fastbert/ops/attention/attention.py has their schemas.
#pragma once

#include <tuple>

#include "attention_options.h"

namespace fastbert {

std::tuple<Array, Array> attention_fwd_cpu(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                                           const OptionalArray& philox, const AttentionOptions& options,
                                           double dropout_p, bool return_stats);

std::tuple<Array, Array, Array> attention_bwd_cpu(const Array& dout, const Array& q, const Array& k, const Array& v,
                                                  const Array& out, const Array& softmax_stats, const Array& cu_seqlens,
                                                  const OptionalArray& philox, const AttentionOptions& options,
                                                  double dropout_p);

// attention_bwd_cpu into dq, dk and dv, whose tokens and heads may lie apart, as in a slice of a merged projection.
void attention_gradients(const Array& dout, const Array& q, const Array& k, const Array& v, const Array& out,
                         const Array& softmax_stats, const Array& cu_seqlens, const OptionalArray& philox,
                         const AttentionOptions& options, double dropout_p, const Array& dq, const Array& dk,
                         const Array& dv);

// attention_fwd_cpu in inference, into `out`, of q's shape.
void attention_rows(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                    const AttentionOptions& options, const Array& out);

// The operators, with the schemas' arguments.
std::tuple<Array, Array> attention_fwd_operator(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                                                const OptionalArray& philox, const OptionalArray& window_positions,
                                                const OptionalArray& num_keys, const OptionalArray& cos,
                                                const OptionalArray& sin, double softmax_scale, double dropout_p,
                                                int64_t window_left, int64_t window_right, bool interleaved,
                                                bool by_token, bool return_stats);
std::tuple<Array, Array, Array> attention_bwd_operator(
    const Array& dout, const Array& q, const Array& k, const Array& v, const Array& out, const Array& softmax_stats,
    const Array& cu_seqlens, const OptionalArray& philox, const OptionalArray& window_positions,
    const OptionalArray& num_keys, const OptionalArray& cos, const OptionalArray& sin, double softmax_scale,
    double dropout_p, int64_t window_left, int64_t window_right, bool interleaved, bool by_token);

}  // namespace fastbert
