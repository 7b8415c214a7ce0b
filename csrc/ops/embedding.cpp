#include "embedding.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "../cpu/embedding.h"
#include "gradients.h"
#include "layer_norm.h"
#include "tensors.h"

namespace fastbert {
at::Tensor embed_fwd_cpu(const std::optional<at::Tensor>& input_ids, const at::Tensor& position_ids_,
                         const std::optional<at::Tensor>& token_type_ids, const at::Tensor& word_,
                         const at::Tensor& position_, const std::optional<at::Tensor>& token_type_,
                         const std::optional<at::Tensor>& weight_, const std::optional<at::Tensor>& bias_, double eps) {
  const int64_t tokens = position_ids_.numel(), width = position_.size(-1);
  const auto dtype = position_.scalar_type();
  const at::Tensor ids = checked("input_ids", input_ids, {tokens}, at::kLong);
  const at::Tensor positions = checked("position_ids", position_ids_, {tokens}, at::kLong);
  const at::Tensor types = checked("token_type_ids", token_type_ids, {tokens}, at::kLong);
  const at::Tensor word = checked("word", word_, {input_ids.has_value() ? word_.size(0) : tokens, width}, dtype);
  const at::Tensor position = checked("position", position_, {position_.size(0), width}, dtype);
  const at::Tensor weight = checked("weight", weight_, {width}, dtype), bias = checked("bias", bias_, {width}, dtype);
  const at::Tensor type = token_type_.has_value()
                              ? checked("token_type", *token_type_, {token_type_->size(0), width}, dtype)
                              : at::Tensor();
  const at::Tensor out = at::empty({tokens, width}, position.options());
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const EmbedFwd<T> args{{data<const T>(word), data<const T>(type), data<const T>(position)},
                           {data<const int64_t>(ids), data<const int64_t>(types), data<const int64_t>(positions)},
                           {1, 0, 0},
                           width,
                           data<T>(out)};
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width));
    std::function<void(int64_t, int64_t)> norm;
    if (weight.defined()) norm = add_layer_norm_rows(out, at::Tensor(), at::Tensor(), weight, bias, eps, out);
    at::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
      embed_fwd(args, begin, end);
      if (norm) norm(begin, end);
    });
  });
  return out;
}

at::Tensor embed_bwd_cpu(const at::Tensor& dout_, const at::Tensor& ids_, const at::Tensor& table,
                         int64_t padding_idx) {
  const int64_t tokens = ids_.numel(), width = table.size(1);
  const at::Tensor dout = checked("dout", dout_, {tokens, width}, table.scalar_type());
  const at::Tensor ids = checked("ids", ids_, {tokens}, at::kLong);
  const auto* id = ids.const_data_ptr<int64_t>();
  std::vector<int64_t> order(static_cast<size_t>(tokens));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return id[a] != id[b] ? id[a] < id[b] : a < b; });
  const at::Tensor dtable = gradient_like(table);
  auto* bytes = static_cast<char*>(dtable.mutable_data_ptr());
  at::parallel_for(0, static_cast<int64_t>(dtable.nbytes()), 1 << 18, [&](int64_t begin, int64_t end) {
    std::memset(bytes + begin, 0, static_cast<size_t>(end - begin));
  });
  for_dtype(table.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const EmbedBwd<T> args{data<const T>(dout), order.data(), id, tokens, width, padding_idx, data<T>(dtable)};
    at::parallel_for(0, width, 64, [&](int64_t begin, int64_t end) { embed_bwd(args, begin, end); });
  });
  return dtable;
}

}  // namespace fastbert
