// The CUDA kernels of the schemas in fastbert/ops/bindings.c.py.

#include <torch/library.h>

#include "operators.h"

TORCH_LIBRARY_IMPL(fastbert, CUDA, m) {
  m.impl("add_layer_norm_fwd_cuda", &fastbert::add_layer_norm_fwd_cuda);
  m.impl("add_layer_norm_bwd_cuda", &fastbert::add_layer_norm_bwd_cuda);
  m.impl("embed_fwd_cuda", &fastbert::embed_fwd_cuda);
  m.impl("feed_forward_cuda", &fastbert::feed_forward_cuda);
  m.impl("feed_forward_bwd_cuda", &fastbert::feed_forward_bwd_cuda);
}
