#include "attention_distances.h"

#include <algorithm>

#include "../cpu/attention_relative.h"

namespace fastbert {
namespace {

int64_t floor_blocks(int64_t n) {
  return n >= 0 ? n / kAttentionBlock : -((kAttentionBlock - 1 - n) / kAttentionBlock);
}
int64_t ceil_blocks(int64_t n) { return -floor_blocks(-n); }

// For squares of blocks of queries and of keys from `begin` to `end` blocks apart.
template <typename F>
DistanceColumns columns_of(int64_t begin, int64_t end, const F& row_of) {
  DistanceColumns columns;
  columns.first = (begin - 1) * kAttentionBlock + 1;
  columns.panels = end - begin + 2;
  for (int64_t i = 0; i < columns.panels * kAttentionBlock; ++i) columns.rows.push_back(row_of(columns.first + i));
  return columns;
}

}  // namespace

Distances Distances::of(const int32_t* rows, int64_t longest, int64_t reach) {
  const auto row_ahead = [&](int64_t distance) {
    return rows[longest - 1 - std::clamp(distance, 1 - reach, reach - 1)];
  };
  Distances distances;
  distances.reach = reach;
  int64_t left = 1 - reach, right = reach - 1;
  while (left < 0 && row_ahead(left + 1) == row_ahead(left)) ++left;
  while (right > 0 && row_ahead(right - 1) == row_ahead(right)) --right;
  distances.clamped_left = left, distances.clamped_right = right;
  // A square whose distances are all clamped does as well for those that are further.
  const int64_t blocks = ceil_blocks(reach) - 1, to_end = kTileDistances - kAttentionBlock;
  const int64_t begin = std::max(-blocks, floor_blocks(left - to_end)),
                end = std::min(blocks, ceil_blocks(right + to_end));
  distances.ahead = columns_of(begin, end, row_ahead);
  distances.behind = columns_of(-end, -begin, [&](int64_t distance) { return row_ahead(-distance); });
  return distances;
}

ColumnsOfRows ColumnsOfRows::of(const std::vector<int32_t>& rows, int64_t num_rows) {
  ColumnsOfRows of_rows;
  of_rows.begin.resize(static_cast<size_t>(num_rows) + 1);
  of_rows.columns.resize(rows.size());
  for (const int32_t row : rows) ++of_rows.begin[static_cast<size_t>(row) + 1];
  for (size_t row = 1; row < of_rows.begin.size(); ++row) of_rows.begin[row] += of_rows.begin[row - 1];
  std::vector<int32_t> next(of_rows.begin);
  for (size_t i = 0; i < rows.size(); ++i) {
    of_rows.columns[static_cast<size_t>(next[static_cast<size_t>(rows[i])]++)] = static_cast<int32_t>(i);
  }
  return of_rows;
}

std::vector<size_t> group_ends(const std::vector<int64_t>& offsets, int64_t least_scores) {
  constexpr int64_t kMostGroups = 8;
  const auto scores_of = [&](size_t i) { return (offsets[i + 1] - offsets[i]) * (offsets[i + 1] - offsets[i]); };
  const size_t count = offsets.size() - 1;
  int64_t total = 0;
  for (size_t i = 0; i < count; ++i) total += scores_of(i);
  const int64_t groups = std::clamp<int64_t>(total / least_scores, 1, kMostGroups);
  std::vector<size_t> ends;
  int64_t before = 0;
  for (size_t i = 0; i < count; ++i) {
    before += scores_of(i);
    if (before >= total * static_cast<int64_t>(ends.size() + 1) / groups) ends.push_back(i + 1);
  }
  if (total > 0) ends.back() = count;  // sequences without a token, where they come last, make no group of their own
  return ends;
}

}  // namespace fastbert
