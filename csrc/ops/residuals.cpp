#include "residuals.h"

#include <algorithm>

#include "array.h"

namespace fastbert {
namespace {

int64_t begins_of(int64_t out_features) { return num_panels(out_features) * kPanel + 1; }

}  // namespace

std::vector<int32_t> residual_begins(const PackArgs& args) {
  if (args.format != DType::kInt8 || !splits_bytes()) return {};
  std::vector<int32_t> begins(static_cast<size_t>(begins_of(args.out_features)));
  count_residuals(args, begins.data());
  return begins;
}

int64_t residual_bytes(const std::vector<int32_t>& begins) {
  if (begins.empty()) return 0;
  return static_cast<int64_t>(begins.size() * sizeof(int32_t) + static_cast<size_t>(begins.back()) * sizeof(Residual));
}

void split_panels_into(char* memory, const PackArgs& args, const std::vector<int32_t>& begins) {
  if (begins.empty()) return;
  auto* begin = reinterpret_cast<int32_t*>(memory);
  std::copy(begins.begin(), begins.end(), begin);
  auto* values = reinterpret_cast<Residual*>(begin + begins.size());
  const int64_t steps = panel_bytes(args.format, args.in_features) / (kPanel * 4);
  parallel_for(0, num_panels(args.out_features), 1,
               [&](int64_t first, int64_t last) { split_panels(args.packed, steps, first, last, begin, values); });
}

Residuals residuals_in(const char* memory, int64_t out_features) {
  if (memory == nullptr) return {};
  const auto* begin = reinterpret_cast<const int32_t*>(memory);
  return {begin, reinterpret_cast<const Residual*>(begin + begins_of(out_features))};
}

}  // namespace fastbert
