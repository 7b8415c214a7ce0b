// add_layer_norm and add_rms_norm on a GPU, over raw device pointers.
//
//   summed = dropout(x + x_bias) + residual, rounded to the dtype
//   out    = (summed - mean) * rstd * weight + bias
//
// RMSNorm is LayerNorm with a mean of 0: rstd is 1 / sqrt(mean(summed^2) + eps).
//
// Matrices are row-major (rows, hidden_size) without gaps, hidden_size from 1 to 8192; vectors are (hidden_size,); a
// null pointer leaves that operand or result out.
#pragma once

#include "dropout.h"
#include "runtime.h"

namespace fastbert {

struct AddLayerNormFwdArgs {
  DType dtype;
  bool rms;
  const void* x;
  const void* x_bias;    // or null
  const void* residual;  // or null
  const void* weight;
  const void* bias;  // or null
  DropoutMask dropout;
  float eps;
  int64_t rows;
  int hidden_size;
  void* out;
  void* summed;  // or null
  float* mean;   // (rows,), or null, as it is for RMSNorm
  float* rstd;   // (rows,), or null
};

cudaError_t launch_add_layer_norm_fwd(const AddLayerNormFwdArgs& args, cudaStream_t stream);

struct AddLayerNormBwdArgs {
  DType dtype;
  const void* dout;
  const void* dsum;  // or null
  const void* summed;
  const float* mean;  // null: RMSNorm
  const float* rstd;
  const void* weight;
  DropoutMask dropout;
  int64_t rows;
  int hidden_size;
  void* dx;  // null without dropout: dx is then dsummed
  void* dsummed;
  void* dx_bias;  // or null
  void* dweight;
  void* dbias;
  float* shares;  // (add_layer_norm_bwd_shares(...), 3, hidden_size), in no particular state
};

// How many shares of the vectors' gradients a backward makes: by its sizes alone, so that the sums' last bits do not
// depend on the GPU.
int64_t add_layer_norm_bwd_shares(int64_t rows, int hidden_size);

cudaError_t launch_add_layer_norm_bwd(const AddLayerNormBwdArgs& args, cudaStream_t stream);

}  // namespace fastbert
