// The registered attention operators of the CPU backend; fastbert/ops/attention.py has their schemas.
#pragma once

#include <tuple>

#include "array.h"

namespace fastbert {

std::tuple<Array, Array> attention_fwd_cpu(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                                           const OptionalArray& philox, double softmax_scale, double dropout_p,
                                           bool return_stats);

std::tuple<Array, Array, Array> attention_bwd_cpu(const Array& dout, const Array& q, const Array& k, const Array& v,
                                                  const Array& out, const Array& softmax_stats, const Array& cu_seqlens,
                                                  const OptionalArray& philox, double softmax_scale, double dropout_p);

// attention_bwd_cpu into dq, dk and dv, whose tokens and heads may lie apart, as in a slice of a merged projection.
void attention_gradients(const Array& dout, const Array& q, const Array& k, const Array& v, const Array& out,
                         const Array& softmax_stats, const Array& cu_seqlens, const OptionalArray& philox,
                         double softmax_scale, double dropout_p, const Array& dq, const Array& dk, const Array& dv);

// attention_fwd_cpu in inference, into `out`, (total_tokens, num_heads, head_dim) like the others.
void attention_rows(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens, double softmax_scale,
                    const Array& out);

}  // namespace fastbert
