// Embeddings and their LayerNorm on a GPU, over raw device pointers:
//
//   out = LayerNorm(word[input_ids] + token_type[token_type_ids] + position[position_ids])
//
// The sum is rounded to the dtype before it is normalised. Tables are row-major (their rows, width), width from 1 to
// 8192, and have at least one row. A token with an id that is no row of its table comes out as NaN; nothing beyond the
// tables is read.
#pragma once

#include "runtime.h"

namespace fastbert {

struct EmbedFwdArgs {
  DType dtype;
  const void* word;
  const void* position;           // or null
  const void* token_type;         // or null
  const int64_t* input_ids;       // null: row r of word is token r's
  const int64_t* position_ids;    // null without the table
  const int64_t* token_type_ids;  // null: type 0
  int64_t word_rows;
  int64_t position_rows;  // 1 without the table, and so below
  int64_t token_type_rows;
  const void* weight;  // null: no LayerNorm
  const void* bias;    // or null
  float eps;
  int64_t rows;
  int width;
  void* out;
};

cudaError_t launch_embed_fwd(const EmbedFwdArgs& args, cudaStream_t stream);

}  // namespace fastbert
