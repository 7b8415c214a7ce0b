// The late interaction of queries and documents (Khattab & Zaharia 2020, "ColBERT", eq. 3): for each token of a query
// the largest product with a token of the document, added up over the query's tokens; and its gradients.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace fastbert {

// What a document without tokens scores, as sentence-transformers has it.
constexpr float kNoDocument = -1e9f;

struct MaxSimFwd {
  const char* panels;  // of the queries' tokens, packed (pack_panels, maxsim_strips)
  DType format;        // of the panels
  int64_t width;
  const int64_t* columns;       // (queries,): where each query's tokens begin among the panels' columns
  const int32_t* offsets;       // int8 panels: of each column, what the rows' offset of 128 adds to its sums
  const float* query_scales;    // int8 panels: of each token, in the queries' own order
  const int32_t* cu_seqlens_q;  // (queries + 1,)
  Residuals residuals;          // int8 panels
  RowsArg documents;            // (tokens, width); int8 rows have a scale each, and go with int8 panels
  const int32_t* cu_seqlens_d;
};

// `count` panels of `steps` steps, in place: from as pack_panels leaves them to as maxsim_fwd reads them.
void maxsim_strips(char* panels, int64_t count, int64_t steps);

// Documents [document_begin, document_end) with queries [query_begin, query_end), whose columns follow each other.
// scores: of the first query and the first document; a query's stand `score_stride` after those of the one before.
// winners, or null: for each document, `winner_stride` apart, and each of the queries' tokens the row of `documents`
// that had the largest product, the first of several; -1 where there is none.
void maxsim_fwd(const MaxSimFwd& args, int64_t document_begin, int64_t document_end, int64_t query_begin,
                int64_t query_end, float* scores, int64_t score_stride, int32_t* winners, int64_t winner_stride);

// A query and a document, in backward: the gradient of their score, and the winners of the query's tokens.
struct MaxSimPair {
  int64_t query, document;
  float dscore;
  const int32_t* winners;
};

template <typename T>
struct MaxSimBwd {
  const T *queries, *documents;  // (tokens, width)
  int64_t width;
  const int32_t *cu_seqlens_q, *cu_seqlens_d;
  T *dqueries, *ddocuments;
};

// Of one query's tokens, or of one document's: all its pairs, in the order in which they are added up.
template <typename T>
void maxsim_dquery(const MaxSimBwd<T>& args, int64_t query, const MaxSimPair* pairs, int64_t count);
template <typename T>
void maxsim_ddocument(const MaxSimBwd<T>& args, int64_t document, const MaxSimPair* pairs, int64_t count);

}  // namespace fastbert
