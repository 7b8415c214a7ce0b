// Which distances relative terms are needed for, and which row of the tables each of them has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastbert {

// Columns of a table by distance: as cpu/attention_relative.h's DistanceTable, and the row of each column.
struct DistanceColumns {
  int64_t first, panels;
  std::vector<int32_t> rows;
};

// The columns of each row, ascending: columns[begin[r]] to columns[begin[r + 1]] are row r's.
struct ColumnsOfRows {
  std::vector<int32_t> begin, columns;

  static ColumnsOfRows of(const std::vector<int32_t>& rows, int64_t num_rows);
};

struct Distances {
  int64_t reach;  // all distances are below it
  int64_t clamped_left, clamped_right;
  DistanceColumns ahead, behind;  // by a key's place less a query's, and the other way round

  // `rows` (2 * longest - 1,): of a query's place less a key's, from 1 - longest on; 0 < reach <= longest.
  static Distances of(const int32_t* rows, int64_t longest, int64_t reach);
};

// Where the groups of sequences end whose gradients of tables are summed up apart, by a head's work: each costs as many
// additions as there are distances. The same for any number of threads. Where there are tokens, each group has some.
std::vector<std::size_t> group_ends(const std::vector<int64_t>& offsets, int64_t least_scores);

}  // namespace fastbert
