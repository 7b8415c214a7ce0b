#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../include/scratch.h"
#include "layer_norm.h"

#define FASTBERT_BODY "../cpu/layer_norm_fwd_body.h"
#include "../include/foreach_isa.h"

namespace fastbert {

void add_layer_norm_fwd(const AddLayerNormFwd<float>& args, int64_t begin, int64_t end) {
  FASTBERT_RUN(add_layer_norm_fwd, args, begin, end);
}

void add_layer_norm_fwd(const AddLayerNormFwd<BFloat16>& args, int64_t begin, int64_t end) {
  FASTBERT_RUN(add_layer_norm_fwd, args, begin, end);
}

}  // namespace fastbert
