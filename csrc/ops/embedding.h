// The registered embedding operators of the CPU backend; fastbert/ops/embedding.py has their schemas.
#pragma once

#include "array.h"

namespace fastbert {

Array embed_fwd_cpu(const OptionalArray& input_ids, const OptionalArray& position_ids,
                    const OptionalArray& token_type_ids, const Array& word, const OptionalArray& position,
                    const OptionalArray& token_type, const OptionalArray& weight, const OptionalArray& bias,
                    double eps);

// The same in memory of `make`, for what goes on with it.
Array embed_into(MakeArray make, const OptionalArray& input_ids, const OptionalArray& position_ids,
                 const OptionalArray& token_type_ids, const Array& word, const OptionalArray& position,
                 const OptionalArray& token_type, const OptionalArray& weight, const OptionalArray& bias, double eps);

Array embed_bwd_cpu(const Array& dout, const Array& ids, const Array& table, int64_t padding_idx);

}  // namespace fastbert
