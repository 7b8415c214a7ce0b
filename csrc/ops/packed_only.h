// Weights of which nothing is left but the packed copy that products read: of a model that is only run. Such a copy is
// the memory of a tensor of its own, which Python has in the weight's place (fastbert/packed_weights.py), so that it is
// freed as any tensor is, and nothing has to be looked up.
#pragma once

#include <optional>

#include "../cpu/gemm.h"
#include "array.h"

namespace fastbert {

// The error where such a weight is asked for more than products. Python raises it, too.
inline constexpr const char* kPackedOnly =
    "of this weight nothing is left but the copy that products read: the model was loaded to be run only, and its "
    "layers' weights were freed. Load it anew to read, convert, copy, save or train them.";

// The memory of a copy, bytes, of weight (out_features, in_features), contiguous, packed in `format_for` its dtype.
// `parts` 2: products take its upper and its lower half, each of them alone. What products take is a view of this of
// the weight's sizes, with strides (1, 0), so that one of some rows begins where they would.
Array pack_only_cpu(const Array& weight, int64_t parts);

struct PackedOnly {
  DType format;
  const char* panels;
  const int32_t* channel_offset;  // int8 only
  Residuals residuals;
};

// Of such a view, whole or of one of the parts; none of others. Raises kPackedOnly for a view
// of other rows.
std::optional<PackedOnly> packed_only(const Array& weight);

}  // namespace fastbert
