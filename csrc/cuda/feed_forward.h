// What stands between the two products of a feed-forward on a GPU, over raw device pointers. Matrices are row-major
// (rows, columns) without gaps.
#pragma once

#include "../include/activation.h"
#include "runtime.h"

namespace fastbert {

// inner (rows, columns) = activation(pre), in pre's own memory where both are one address. Gated: pre is (rows, 2
// columns), inner = activation(first half) * second half, in memory of its own.
struct ActivationFwdArgs {
  DType dtype;
  Activation activation;
  bool gated;
  const void* pre;
  int64_t rows;
  int64_t columns;
  void* inner;
};

cudaError_t launch_activation_fwd(const ActivationFwdArgs& args, cudaStream_t stream);

// dpre, as wide as pre, and inner, which forward does not keep, from dinner (rows, columns). Whichever of the two has
// dinner's shape may be written in its memory: dpre, or, gated, inner.
struct ActivationBwdArgs {
  DType dtype;
  Activation activation;
  bool gated;
  const void* dinner;
  const void* pre;
  int64_t rows;
  int64_t columns;
  void* dpre;
  void* inner;
  void* dbias;                   // as wide as pre, or null
  float* shares;                 // (activation_bwd_shares(rows), pre's columns) when there is dbias
  void* second_dbias = nullptr;  // gated: receives the second half, of which dbias then has none
};

// How many shares of dbias a backward makes: by the number of rows alone, so that the sum's last bits do not depend on
// the GPU.
int64_t activation_bwd_shares(int64_t rows);

cudaError_t launch_activation_bwd(const ActivationBwdArgs& args, cudaStream_t stream);

}  // namespace fastbert
