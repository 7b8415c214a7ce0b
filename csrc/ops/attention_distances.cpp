#include "attention_distances.h"

#include <algorithm>

#include "../cpu/attention.h"

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
  distances.far_left = left, distances.far_right = right;
  // A square of which all is far does as well for those that are further.
  const int64_t blocks = ceil_blocks(reach) - 1, to_end = kAttentionBlock - 1;
  const int64_t begin = std::max(-blocks, floor_blocks(left - to_end)),
                end = std::min(blocks, ceil_blocks(right + to_end));
  distances.ahead = columns_of(begin, end, row_ahead);
  distances.behind = columns_of(-end, -begin, [&](int64_t distance) { return row_ahead(-distance); });
  return distances;
}

}  // namespace fastbert
