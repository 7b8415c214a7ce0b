// The CUDA kernels of the schemas in fastbert/ops/_library.py.

#include <torch/library.h>

#include "operators.h"

TORCH_LIBRARY_IMPL(fastbert, CUDA, m) {
  m.impl("add_layer_norm_fwd_cuda", &fastbert::add_layer_norm_fwd_cuda);
  m.impl("add_layer_norm_bwd_cuda", &fastbert::add_layer_norm_bwd_cuda);
  m.impl("embed_fwd_cuda", &fastbert::embed_fwd_cuda);
  m.impl("bias_activation_fwd_cuda", &fastbert::bias_activation_fwd_cuda);
  m.impl("activation_bwd_cuda", &fastbert::activation_bwd_cuda);
}
