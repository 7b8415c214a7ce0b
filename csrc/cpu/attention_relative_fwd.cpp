#include <algorithm>
#include <atomic>
#include <type_traits>

#include "../include/scratch.h"
#include "attention_relative.h"
#include "gemm.h"

#define FASTBERT_BODY "../cpu/attention_relative_fwd_body.h"
#define FASTBERT_USES_AMX
#include "../include/foreach_isa.h"

namespace fastbert {

template <typename T>
void attention_relative_fwd(const AttentionFwd<T>& args, const RelativeTerms& terms, const AttentionTask& task) {
  FASTBERT_RUN(attention_relative_fwd, args, terms, task);
}

template void attention_relative_fwd(const AttentionFwd<float>&, const RelativeTerms&, const AttentionTask&);
template void attention_relative_fwd(const AttentionFwd<BFloat16>&, const RelativeTerms&, const AttentionTask&);

}  // namespace fastbert
