#include "../../cuda/embedding.h"

#include "../embedding_tensors.h"
#include "launch.h"
#include "operators.h"

namespace fastbert {

at::Tensor embed_fwd_cuda(const std::optional<at::Tensor>& input_ids, const at::Tensor& position_ids,
                          const std::optional<at::Tensor>& token_type_ids, const at::Tensor& word,
                          const at::Tensor& position, const std::optional<at::Tensor>& token_type,
                          const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps) {
  const auto t = embed_fwd_tensors(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias,
                                   position.device());
  check_row_width(t.out.size(1));
  const EmbedFwdArgs args{storage_of(t.out.scalar_type()),
                          data<const void>(t.word),
                          data<const void>(t.position),
                          data<const void>(t.token_type),
                          data<const int64_t>(t.ids),
                          data<const int64_t>(t.positions),
                          data<const int64_t>(t.types),
                          t.word.size(0),
                          t.position.size(0),
                          t.token_type.defined() ? t.token_type.size(0) : 1,
                          data<const void>(t.weight),
                          data<const void>(t.bias),
                          static_cast<float>(eps),
                          t.out.size(0),
                          static_cast<int>(t.out.size(1)),
                          data<void>(t.out)};
  launch_for(t.out, launch_embed_fwd, args);
  return t.out;
}

}  // namespace fastbert
