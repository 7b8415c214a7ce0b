// Forward attention for one ISA; included by attention_fwd.cpp through foreach_isa.h.
#include "attention_fwd_heads.h"

template <typename E, typename T>
void attention_fwd_task(const AttentionFwd<T>& args, const AttentionTask& task) {
  if constexpr (!kUsesAmx<typename DotOf<E>::Dot>) {
    static_assert(kAttentionBlock >= kPanel);  // or a sequence of one panel might be cut into several tasks
    if (!task.has_window && task.length <= kPanel) return attention_fwd_short<E, false>(args, task, nullptr);
  }
  task.has_window ? attention_fwd_heads<E, true, false>(args, task, nullptr)
                  : attention_fwd_heads<E, false, false>(args, task, nullptr);
}

void attention_fwd(const AttentionFwd<float>& args, const AttentionTask& task) {
#if defined(FASTBERT_BF16)
  avx512::attention_fwd(args, task);
#else
  attention_fwd_task<float>(args, task);
#endif
}

void attention_fwd(const AttentionFwd<BFloat16>& args, const AttentionTask& task) {
#if defined(FASTBERT_BF16)
  attention_fwd_task<BFloat16>(args, task);
#else
  attention_fwd_task<float>(args, task);
#endif
}
