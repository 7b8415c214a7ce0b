#include <algorithm>
#include <atomic>
#include <type_traits>

#include "../include/scratch.h"
#include "attention.h"
#include "attention_relative.h"
#include "gemm.h"

#define FASTBERT_BODY "../cpu/attention_bwd_body.h"
#define FASTBERT_USES_AMX
#include "../include/foreach_isa.h"

namespace fastbert {

template <typename T>
void attention_bwd(const AttentionBwd<T>& args, const AttentionTask& task) {
  FASTBERT_RUN(attention_bwd, args, task);
}

template void attention_bwd(const AttentionBwd<float>&, const AttentionTask&);
template void attention_bwd(const AttentionBwd<BFloat16>&, const AttentionTask&);

}  // namespace fastbert
