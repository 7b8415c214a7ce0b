// Attention with relative terms: the score of a query and a key, with r the row of their distance, is
// (q k + q key[r] + k query[r]) * softmax_scale + bias[r] (He et al. 2021, "DeBERTa", section 3.1; Song et al. 2020,
// "MPNet"). Tables have a column for each distance, so that what a row of scores adds is one run of columns.
#pragma once

#include "attention.h"

namespace fastbert {

// A table with a column for each distance from `first` on, which is a multiple of kPanel plus 1: where a square of
// kPanel queries and kPanel keys begins. Columns beyond the last distance that there is repeat it.
struct DistanceTable {
  const char* columns;  // (num_heads, panels, steps along head_dim, kPanel); null: there is no such term
  const char* rows;     // backward: (num_heads, panels of head_dim, steps along the columns, kPanel)
  int64_t first, panels;
};

// No tile of which any distance is unclamped has more of them.
constexpr int64_t kTileDistances = 192;

// `ahead` is a key's place less a query's. Up to `clamped_left` and from `clamped_right` on all distances have the same
// row of the tables; where there are more of them than a tile has, the tables end there.
struct RelativeTerms {
  DistanceTable key;         // what queries meet, by the distance ahead
  DistanceTable query;       // what keys meet, by the distance behind
  const float* bias;         // (num_heads, bias_stride), by the distance ahead from 1 - reach on; null: there is none
  const float* bias_turned;  // the same by the distance behind
  int64_t bias_stride;
  int64_t reach;  // all distances are below it
  int64_t clamped_left, clamped_right;
  const int32_t* places;  // (total_tokens,); null: 0, 1, 2... in each sequence

  bool has_tables() const { return key.columns != nullptr || query.columns != nullptr; }
  // Whether the places of a sequence's tokens do not follow each other.
  bool has_holes(int64_t first_token, int64_t length) const {
    return places != nullptr && places[first_token + length - 1] - places[first_token] != length - 1;
  }
};

// As attention_fwd. Where there is a bias, softmax_stats are of scores that were scaled and have it.
template <typename T>
void attention_relative_fwd(const AttentionFwd<T>& args, const RelativeTerms& terms, const AttentionTask& task);

// Where a head of a group of sequences sums up the gradients of the tables by distance, as they count: (panels of
// head_dim, panels * kPanel, kPanel) each, relative_sum_bytes. Null where there is no such term.
struct RelativeSums {
  char *key, *query;
  float* bias;  // (panels * kPanel,)
};

inline int64_t relative_sum_bytes(int64_t head_dim, int64_t panels) {
  constexpr int64_t kFloats = kAttentionBlock;  // kPanel
  return (head_dim + kFloats - 1) / kFloats * panels * kFloats * kFloats * 4;
}

// attention_bwd of one head of some sequences, in their order, each with all of its queries and keys. The tables'
// gradients lack softmax_scale, that of the bias does not.
template <typename T>
void attention_relative_bwd(const AttentionBwd<T>& args, const RelativeTerms& terms, const RelativeSums& sums,
                            int64_t head, const AttentionTask* tasks, int64_t count);

// The gradient of one head's table from the sums of all groups, which are summed up in their order.
template <typename T>
struct TableGradient {
  const char* sums;  // (groups, num_heads, relative_sum_bytes)
  int64_t groups, num_heads, head_dim, panels, num_rows;
  const int32_t *begin, *columns;  // the columns of row r are columns[begin[r]] to columns[begin[r + 1]]
  float softmax_scale;
  T* out;
  int64_t row_stride, head_stride;
};

template <typename T>
void table_gradient(const TableGradient<T>& args, int64_t head);

// One table of one dtype, (num_rows, num_heads, head_dim), strides in elements, and what becomes of it.
template <typename T>
struct PackTable {
  const T* data;
  int64_t row_stride, head_stride, head_dim;
  const int32_t* row_of_column;  // (panels * kPanel,)
  int64_t panels;
  char *columns, *rows;  // as in DistanceTable; rows may be null
};

// The bytes of a head's columns and rows, in the form that this instruction set multiplies; `dtype` may be null.
template <typename T>
int64_t table_column_bytes(const T* dtype, int64_t head_dim, int64_t panels);
template <typename T>
int64_t table_row_bytes(const T* dtype, int64_t head_dim, int64_t panels);

// One panel of one head. Behind the last one there are kPackedSlack bytes, which are read and not used.
template <typename T>
void pack_table(const PackTable<T>& table, int64_t head, int64_t panel);
constexpr int64_t kPackedSlack = 256;

}  // namespace fastbert
