// The CUDA kernels of the schemas in fastbert/ops/*.py.

#include "../register.h"
#include "operators.h"

STABLE_TORCH_LIBRARY_IMPL(fastbert, CUDA, m) {
  m.impl("add_layer_norm_fwd_cuda", fastbert::boxed_operator<&fastbert::add_layer_norm_fwd_cuda>);
  m.impl("add_layer_norm_bwd_cuda", fastbert::boxed_operator<&fastbert::add_layer_norm_bwd_cuda>);
  m.impl("embed_fwd_cuda", fastbert::boxed_operator<&fastbert::embed_fwd_cuda>);
  m.impl("feed_forward_cuda", fastbert::boxed_operator<&fastbert::feed_forward_cuda>);
  m.impl("feed_forward_bwd_cuda", fastbert::boxed_operator<&fastbert::feed_forward_bwd_cuda>);
}
