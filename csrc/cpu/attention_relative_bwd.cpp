#include <algorithm>
#include <atomic>
#include <type_traits>

#include "../include/scratch.h"
#include "attention_relative.h"
#include "gemm.h"

#define FASTBERT_BODY "../cpu/attention_relative_bwd_body.h"
#define FASTBERT_USES_AMX
#include "../include/foreach_isa.h"

namespace fastbert {

template <typename T>
void attention_relative_bwd(const AttentionBwd<T>& args, const RelativeTerms& terms, const RelativeSums& sums,
                            int64_t head, const AttentionTask* tasks, int64_t count) {
  FASTBERT_RUN(attention_relative_bwd, args, terms, sums, head, tasks, count);
}

template void attention_relative_bwd(const AttentionBwd<float>&, const RelativeTerms&, const RelativeSums&, int64_t,
                                     const AttentionTask*, int64_t);
template void attention_relative_bwd(const AttentionBwd<BFloat16>&, const RelativeTerms&, const RelativeSums&, int64_t,
                                     const AttentionTask*, int64_t);

}  // namespace fastbert
