// Forward attention with relative terms for one ISA; included by attention_relative_fwd.cpp through foreach_isa.h. A
// file of its own: what the compiler makes of plain attention stays as it is.
#include "attention_fwd_heads.h"

template <typename E, typename T>
void attention_relative_fwd_task(const AttentionFwd<T>& args, const RelativeTerms& terms, const AttentionTask& task) {
  if constexpr (!kUsesAmx<typename DotOf<E>::Dot>) {
    const bool is_short = task.length <= kPanel && !terms.has_holes(task.first_token, task.length);
    if (!task.has_window && is_short) return attention_fwd_short<E, true>(args, task, &terms);
  }
  task.has_window ? attention_fwd_heads<E, true, true>(args, task, &terms)
                  : attention_fwd_heads<E, false, true>(args, task, &terms);
}

void attention_relative_fwd(const AttentionFwd<float>& args, const RelativeTerms& terms, const AttentionTask& task) {
#if defined(FASTBERT_BF16)
  avx512::attention_relative_fwd(args, terms, task);
#else
  attention_relative_fwd_task<float>(args, terms, task);
#endif
}

void attention_relative_fwd(const AttentionFwd<BFloat16>& args, const RelativeTerms& terms, const AttentionTask& task) {
#if defined(FASTBERT_BF16)
  attention_relative_fwd_task<BFloat16>(args, terms, task);
#else
  attention_relative_fwd_task<float>(args, terms, task);
#endif
}
