// What stands between the two products of a feed-forward on a GPU, over raw device pointers. Matrices are row-major
// (rows, columns) without gaps.
#pragma once

#include "../include/activation.h"
#include "runtime.h"

namespace fastbert {

// pre += bias, in place and rounded to the dtype; inner = activation(pre).
struct BiasActivationFwdArgs {
  DType dtype;
  Activation activation;
  void* pre;
  const void* bias;  // or null
  int64_t rows;
  int64_t columns;
  void* inner;
};

cudaError_t launch_bias_activation_fwd(const BiasActivationFwdArgs& args, cudaStream_t stream);

// dinner becomes dpre = dinner * activation'(pre), in place; inner = activation(pre), which forward does not keep.
struct ActivationBwdArgs {
  DType dtype;
  Activation activation;
  void* dinner;
  const void* pre;
  int64_t rows;
  int64_t columns;
  void* inner;
  void* dbias;    // or null
  float* shares;  // (activation_bwd_shares(rows), columns) when there is dbias
};

// How many shares of dbias a backward makes: by the number of rows alone, so that the sum's last bits do not depend on
// the GPU.
int64_t activation_bwd_shares(int64_t rows);

cudaError_t launch_activation_bwd(const ActivationBwdArgs& args, cudaStream_t stream);

}  // namespace fastbert
