#include "offsets.h"

#include "tensors.h"

namespace fastbert {

Array checked_offsets(const Array& cu_seqlens, int64_t total_tokens) {
  check(cu_seqlens.dim() == 1 && cu_seqlens.size(0) > 0, "cu_seqlens has shape ", cu_seqlens.sizes(),
        ", expected (batch + 1,)");
  const Array offsets = checked("cu_seqlens", cu_seqlens, cu_seqlens.sizes(), ScalarType::Int);
  const auto* offset = offsets.data<const int32_t>();
  const int64_t last = offsets.size(0) - 1;
  check(offset[0] == 0, "cu_seqlens[0] is ", offset[0], ", expected 0");
  for (int64_t i = 1; i <= last; ++i) {
    check(offset[i] >= offset[i - 1], "cu_seqlens[", i, "] is ", offset[i], ", below cu_seqlens[", i - 1, "] which is ",
          offset[i - 1]);
  }
  check(offset[last] <= total_tokens, "cu_seqlens[-1] is ", offset[last], ", above total_tokens, which is ",
        total_tokens);
  return offsets;
}

}  // namespace fastbert
