// How attention's work is cut into tasks.
#pragma once

#include <cstdint>
#include <vector>

#include "../cpu/attention.h"
#include "attention_options.h"

namespace fastbert {

// Which keys the tokens see, [begin, end) in their sequences: whole ranges, because positions ascend.
struct SeenKeys {
  std::vector<int32_t> begin, end;
  std::vector<char> is_cut;  // whether any token of a sequence does not see all of it
};

SeenKeys seen_keys(const std::vector<int64_t>& offsets, int64_t total_tokens, const AttentionOptions& options);

struct AttentionPlan {
  std::vector<AttentionTask> tasks;
  int64_t workers;
};

AttentionPlan make_plan(const std::vector<int64_t>& offsets, const SeenKeys& seen, int64_t num_heads, int64_t group,
                        bool is_backward);

}  // namespace fastbert
