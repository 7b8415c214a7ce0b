// Bidirectional attention over packed sequences: softmax(q k^T * softmax_scale) v within each sequence, with its
// gradients. Softmax and every sum are fp32; the products' operands are bfloat16 where the ISA multiplies it and q is
// bfloat16, else fp32.
#pragma once

#include <cstdint>

#include "../include/bf16.h"
#include "../include/dropout.h"

namespace fastbert {

// (total_tokens, num_heads, head_dim), strides in elements; head_dim is contiguous.
template <typename T>
struct HeadRows {
  T* data;
  int64_t token_stride, head_stride;

  T* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// fp32 rows of cos and sin, (rows, head_dim / 2), strides in elements: a row belongs to a token, or else to a place in
// a sequence. q and k are rotated by them (Su et al. 2021, section 3.4.2), dimension 2 i with 2 i + 1 if `interleaved`,
// else i with head_dim / 2 + i. Without cos they are taken as they are.
struct RotaryTables {
  const float *cos, *sin;
  int64_t cos_stride, sin_stride;
  bool interleaved, by_token;
};

// What forward and backward have in common. Query head h reads head h / group of k and v. Where a task has a window,
// query `token` sees the keys from key_begin[token] to key_end[token] of its sequence, or none where these are equal;
// neither ever falls from one token of a sequence to the next. A dropped probability is 0, a kept one divided by 1 - p;
// word j of counter
// ((token * num_heads + head) << 32) + i decides for query `token` and key 4 i + j of its sequence.
template <typename T>
struct AttentionInputs {
  HeadRows<const T> q, k, v;
  int64_t num_heads, group, head_dim;
  float softmax_scale;
  Dropout dropout;
  RotaryTables rotary;
  const int32_t *key_begin, *key_end;
};

// softmax_stats are each query's row_max, its largest q k^T (of the largest probability), and row_sum, the sum of
// exp(softmax_scale * (q k^T - row_max)). Their log-sum-exp in one fp32 number would lose digits where scores are
// large: it makes probabilities wrong by 3e-4 at 5000. Those of a query that sees no key are 0 and 1, and its output 0.
template <typename T>
struct AttentionFwd {
  AttentionInputs<T> in;
  HeadRows<T> out;
  float* softmax_stats;  // (2, num_heads, total_tokens), or null
  int64_t total_tokens;
};

template <typename T>
struct AttentionBwd {
  AttentionInputs<T> in;
  HeadRows<const T> out, dout;
  const float* softmax_stats;
  HeadRows<T> dq, dk, dv;
  int64_t total_tokens;
};

// One piece of work of one sequence, `length` tokens from `first_token` on: some of its heads, and some of its queries
// (forward, and dq of backward) or keys (dk and dv). The pieces write disjoint rows, so that any thread may take any of
// them; how a sequence is cut changes no bit of any result.
struct AttentionTask {
  int64_t first_token, length;
  bool has_window;
  int64_t head_begin, head_end;
  int64_t query_begin, query_end;
  int64_t key_begin, key_end;
};

template <typename T>
void attention_fwd(const AttentionFwd<T>& args, const AttentionTask& task);

// dk and dv of the task's keys and dq of its queries. Where one of the ranges is empty only the other's gradients are
// computed; where neither is, both must be whole. Where there are keys, the heads are whole groups.
template <typename T>
void attention_bwd(const AttentionBwd<T>& args, const AttentionTask& task);

// Queries and keys are cut at multiples of this.
constexpr int64_t kAttentionBlock = 64;

}  // namespace fastbert
