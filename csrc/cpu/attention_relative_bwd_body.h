// Backward attention with relative terms for one ISA; included by attention_relative_bwd.cpp through foreach_isa.h.
#include "attention_bwd_heads.h"

template <typename E, typename T>
void attention_relative_bwd_heads(const AttentionBwd<T>& args, const RelativeTerms& relative, const RelativeSums& sums,
                                  int64_t head, const AttentionTask* tasks, int64_t count) {
  static thread_local Scratch scratch;
  const AttentionInputs<T>& in = args.in;
  int64_t size = 0;
  for (int64_t i = 0; i < count; ++i) {
    Carver counting{nullptr};
    lay_out_bwd_terms<E>(counting, in, relative);
    lay_out<E>(counting, in, range_of(in, tasks[i]));
    size = std::max(size, counting.size);
  }
  const int64_t key_bytes = relative_sum_bytes(in.head_dim, relative.key.panels),
                query_bytes = relative_sum_bytes(in.head_dim, relative.query.panels);
  if (sums.key != nullptr) std::memset(sums.key, 0, static_cast<size_t>(key_bytes));
  if (sums.query != nullptr) std::memset(sums.query, 0, static_cast<size_t>(query_bytes));
  if (sums.bias != nullptr) std::memset(sums.bias, 0, static_cast<size_t>(relative.key.panels * kPanel) * 4);
  const DropoutMask mask = DropoutMask::of(in.dropout);
  AmxTiles tiles;
  BwdTerms terms{};
  bool is_clear = false;
  for (int64_t i = 0; i < count; ++i) {
    const AttentionTask& task = tasks[i];
    const BwdRange range = range_of(in, task);
    Carver carver{scratch.get(size)};
    terms = lay_out_bwd_terms<E>(carver, in, relative);  // first, and so in the same place for all tasks
    terms.sums = sums;
    const BwdMemory memory = lay_out<E>(carver, in, range);
    const bool has_holes = relative.has_holes(task.first_token, task.length);
    terms.places = has_holes ? relative.places + task.first_token : nullptr;
    if (!has_holes && !is_clear) clear_band<E>(terms);
    is_clear = !has_holes;
    task.has_window ? attention_bwd_head<E, true, true>(args, tiles, memory, range, mask, task, head, &terms)
                    : attention_bwd_head<E, false, true>(args, tiles, memory, range, mask, task, head, &terms);
  }
  if (sums.key != nullptr) turn_sums<E>(terms, sums.key, key_bytes / (kPanel * kStepBytes));
  if (sums.query != nullptr) turn_sums<E>(terms, sums.query, query_bytes / (kPanel * kStepBytes));
}

void attention_relative_bwd(const AttentionBwd<float>& args, const RelativeTerms& terms, const RelativeSums& sums,
                            int64_t head, const AttentionTask* tasks, int64_t count) {
#if defined(FASTBERT_BF16)
  avx512::attention_relative_bwd(args, terms, sums, head, tasks, count);
#else
  attention_relative_bwd_heads<float>(args, terms, sums, head, tasks, count);
#endif
}

void attention_relative_bwd(const AttentionBwd<BFloat16>& args, const RelativeTerms& terms, const RelativeSums& sums,
                            int64_t head, const AttentionTask* tasks, int64_t count) {
#if defined(FASTBERT_BF16)
  attention_relative_bwd_heads<BFloat16>(args, terms, sums, head, tasks, count);
#else
  attention_relative_bwd_heads<float>(args, terms, sums, head, tasks, count);
#endif
}
