#include "maxsim.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "../include/scratch.h"

#define FASTBERT_BODY "../cpu/maxsim_body.h"
#define FASTBERT_USES_VNNI
#define FASTBERT_USES_AMX
#include "../include/foreach_isa.h"

namespace fastbert {

void maxsim_fwd(const MaxSimFwd& args, int64_t document_begin, int64_t document_end, int64_t query_begin,
                int64_t query_end, float* scores, int64_t score_stride, int32_t* winners, int64_t winner_stride) {
  FASTBERT_RUN(maxsim_fwd, args, document_begin, document_end, query_begin, query_end, scores, score_stride, winners,
               winner_stride);
}

void maxsim_strips(char* panels, int64_t count, int64_t steps) { FASTBERT_RUN(maxsim_strips, panels, count, steps); }

namespace {

// to += scale * x
template <typename T>
FASTBERT_INLINE void add_scaled(const T* x, float scale, int64_t width, float* to) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) to[i] += scale * to_float(x[i]);
}

template <typename T>
FASTBERT_INLINE void maxsim_dquery_body(const MaxSimBwd<T>& args, int64_t query, const MaxSimPair* pairs,
                                        int64_t count) {
  static thread_local Scratch memory;
  auto* sum = reinterpret_cast<float*>(memory.get(args.width * 4));
  const int64_t first = args.cu_seqlens_q[query], tokens = args.cu_seqlens_q[query + 1] - first;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < args.width; ++i) sum[i] = 0.0f;
    for (int64_t p = 0; p < count; ++p) {
      const int64_t winner = pairs[p].winners[t];
      if (winner >= 0) add_scaled(args.documents + winner * args.width, pairs[p].dscore, args.width, sum);
    }
    T* to = args.dqueries + (first + t) * args.width;
    for (int64_t i = 0; i < args.width; ++i) to[i] = from_float<T>(sum[i]);
  }
}

template <typename T>
FASTBERT_INLINE void maxsim_ddocument_body(const MaxSimBwd<T>& args, int64_t document, const MaxSimPair* pairs,
                                           int64_t count) {
  static thread_local Scratch memory;
  const int64_t first = args.cu_seqlens_d[document], numbers = (args.cu_seqlens_d[document + 1] - first) * args.width;
  auto* sums = reinterpret_cast<float*>(memory.get(numbers * 4));
  for (int64_t i = 0; i < numbers; ++i) sums[i] = 0.0f;
  for (int64_t p = 0; p < count; ++p) {
    const int64_t query = args.cu_seqlens_q[pairs[p].query], end = args.cu_seqlens_q[pairs[p].query + 1];
    for (int64_t t = 0; t < end - query; ++t) {
      const int64_t winner = pairs[p].winners[t];
      if (winner < 0) continue;
      add_scaled(args.queries + (query + t) * args.width, pairs[p].dscore, args.width,
                 sums + (winner - first) * args.width);
    }
  }
  T* to = args.ddocuments + first * args.width;
  for (int64_t i = 0; i < numbers; ++i) to[i] = from_float<T>(sums[i]);
}

}  // namespace

FASTBERT_DISPATCH(maxsim_dquery, (const MaxSimBwd<T>& args, int64_t query, const MaxSimPair* pairs, int64_t count),
                  (args, query, pairs, count))
FASTBERT_DISPATCH(maxsim_ddocument,
                  (const MaxSimBwd<T>& args, int64_t document, const MaxSimPair* pairs, int64_t count),
                  (args, document, pairs, count))

template void maxsim_dquery(const MaxSimBwd<float>&, int64_t, const MaxSimPair*, int64_t);
template void maxsim_dquery(const MaxSimBwd<BFloat16>&, int64_t, const MaxSimPair*, int64_t);
template void maxsim_ddocument(const MaxSimBwd<float>&, int64_t, const MaxSimPair*, int64_t);
template void maxsim_ddocument(const MaxSimBwd<BFloat16>&, int64_t, const MaxSimPair*, int64_t);

}  // namespace fastbert
