// Backward attention for one ISA; included by attention_bwd.cpp through foreach_isa.h.
#include "attention_bwd_heads.h"
#include "attention_bwd_short.h"

template <typename E, typename T>
void attention_bwd_heads(const AttentionBwd<T>& args, const AttentionTask& task) {
  if constexpr (!kUsesAmx<typename DotOf<E>::Dot>) {
    static_assert(kBlock >= kPanel);  // or a sequence of one panel might be cut into several tasks
    // Larger heads, whose operands the first-level cache cannot hold all at once, are no faster this way.
    const bool is_short = task.length <= kPanel && task.length * args.in.head_dim <= kPanel * 32;
    if (!task.has_window && is_short) return attention_bwd_short<E>(args, task);
  }
  static thread_local Scratch scratch;
  const BwdRange range = range_of(args.in, task);
  Carver counting{nullptr};
  lay_out<E>(counting, args.in, range);
  Carver carver{scratch.get(counting.size)};
  const BwdMemory memory = lay_out<E>(carver, args.in, range);
  const DropoutMask mask = DropoutMask::of(args.in.dropout);
  AmxTiles tiles;
  for (int64_t head = task.head_begin; head < task.head_end; ++head) {
    task.has_window ? attention_bwd_head<E, true, false>(args, tiles, memory, range, mask, task, head, nullptr)
                    : attention_bwd_head<E, false, false>(args, tiles, memory, range, mask, task, head, nullptr);
  }
}

void attention_bwd(const AttentionBwd<float>& args, const AttentionTask& task) {
#if defined(FASTBERT_BF16)
  avx512::attention_bwd(args, task);
#else
  attention_bwd_heads<float>(args, task);
#endif
}

void attention_bwd(const AttentionBwd<BFloat16>& args, const AttentionTask& task) {
#if defined(FASTBERT_BF16)
  attention_bwd_heads<BFloat16>(args, task);
#else
  attention_bwd_heads<float>(args, task);
#endif
}
