// What attention computes, but for its heads.
#pragma once

#include "array.h"

namespace fastbert {

// q has a multiple of the heads of k and v. A query sees the keys whose position
// is from window_left below to window_right above its own, -1: without end. Positions are those of window_positions,
// int32 (total_tokens,), ascending in each sequence, or else places in the sequence. Keys are the first num_keys tokens
// of a sequence, int32 (batch,), or else all. q and k are rotated by cos and sin, fp32 (rows, head_dim / 2), where they
// are given: a row belongs to a token, or else to a place in a sequence.
struct AttentionOptions {
  double softmax_scale;
  int64_t window_left = -1, window_right = -1;
  OptionalArray window_positions, num_keys;
  OptionalArray cos, sin;
  bool interleaved = false, by_token = false;
};

}  // namespace fastbert
