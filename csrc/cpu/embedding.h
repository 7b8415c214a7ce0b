// Sums of rows of embedding tables, and their gradients. T is the storage type; sums are fp32, rounded once.
#pragma once

#include <cstdint>

#include "../include/bf16.h"

namespace fastbert {

constexpr int64_t kTables = 3;  // word, position, token type

template <typename T>
struct EmbedFwd {
  const T* table[kTables];      // (rows, width), or null: absent
  const int64_t* ids[kTables];  // (tokens,), or null: token r takes row r * row_step
  int64_t row_step[kTables];
  int64_t width;
  T* out;  // (tokens, width)
};

// Tokens [begin, end).
template <typename T>
void embed_fwd(const EmbedFwd<T>& args, int64_t begin, int64_t end);

// dtable[id] = the sum of dout over the tokens with that id, for the ids that occur; other rows are not touched.
template <typename T>
struct EmbedBwd {
  const T* dout;         // (tokens, width)
  const int64_t* order;  // tokens sorted by id, so that equal ids lie side by side, in the tokens' own order
  const int64_t* ids;    // by token
  int64_t tokens, width;
  int64_t padding_idx;  // takes no gradient; -1: none
  T* dtable;
};

// Columns [begin, end) of all rows: the order of additions does not depend on the threads.
template <typename T>
void embed_bwd(const EmbedBwd<T>& args, int64_t begin, int64_t end);

}  // namespace fastbert
