#include "../../cuda/embedding.h"

#include "../embedding_tensors.h"
#include "launch.h"
#include "operators.h"

namespace fastbert {

Array embed_fwd_cuda(const OptionalArray& input_ids, const OptionalArray& position_ids,
                     const OptionalArray& token_type_ids, const Array& word, const OptionalArray& position,
                     const OptionalArray& token_type, const OptionalArray& weight, const OptionalArray& bias,
                     double eps) {
  const auto t = embed_fwd_tensors(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias,
                                   word.device());
  const Array out = empty(t.out_sizes, t.word);
  check_row_width(out.size(1));
  const EmbedFwdArgs args{storage_of(out.scalar_type()),
                          t.word.data<const void>(),
                          t.position.data<const void>(),
                          t.token_type.data<const void>(),
                          t.ids.data<const int64_t>(),
                          t.positions.data<const int64_t>(),
                          t.types.data<const int64_t>(),
                          t.word.size(0),
                          t.position.defined() ? t.position.size(0) : 1,
                          t.token_type.defined() ? t.token_type.size(0) : 1,
                          t.weight.data<const void>(),
                          t.bias.data<const void>(),
                          static_cast<float>(eps),
                          out.size(0),
                          static_cast<int>(out.size(1)),
                          out.data<void>()};
  launch_for(out, launch_embed_fwd, args);
  return out;
}

}  // namespace fastbert
