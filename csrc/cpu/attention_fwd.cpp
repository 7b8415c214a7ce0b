#include <algorithm>
#include <atomic>
#include <type_traits>

#include "../include/scratch.h"
#include "attention.h"
#include "attention_relative.h"
#include "gemm.h"

#define FASTBERT_BODY "../cpu/attention_fwd_body.h"
#define FASTBERT_USES_AMX
#include "../include/foreach_isa.h"

namespace fastbert {

template <typename T>
void attention_fwd(const AttentionFwd<T>& args, const AttentionTask& task) {
  FASTBERT_RUN(attention_fwd, args, task);
}

template void attention_fwd(const AttentionFwd<float>&, const AttentionTask&);
template void attention_fwd(const AttentionFwd<BFloat16>&, const AttentionTask&);

}  // namespace fastbert
