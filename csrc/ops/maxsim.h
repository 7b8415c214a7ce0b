// The registered maxsim operators of the CPU backend; fastbert/ops/maxsim.py has their schemas.
#pragma once

#include <tuple>

#include "array.h"

namespace fastbert {

// queries (tokens, width), documents (tokens, width), float32 or bfloat16, or both int8 with a scale a token;
// their offsets; pairs, int64 (2, pairs), of a query and a document each, or none for all. -> scores (queries,
// documents) or (pairs,); winners (documents, query tokens), or of each pair the query's tokens, one after the other.
std::tuple<Array, Array> maxsim_fwd_cpu(const Array& queries, const Array& cu_seqlens_q, const Array& documents,
                                        const Array& cu_seqlens_d, const OptionalArray& query_scales,
                                        const OptionalArray& scales, const OptionalArray& pairs, bool return_winners);

// The gradients of queries and documents, which have one dtype; without rows where they are not wanted.
std::tuple<Array, Array> maxsim_bwd_cpu(const Array& dscores, const Array& queries, const Array& cu_seqlens_q,
                                        const Array& documents, const Array& cu_seqlens_d, const OptionalArray& pairs,
                                        const Array& winners, bool needs_dqueries, bool needs_ddocuments);

}  // namespace fastbert
