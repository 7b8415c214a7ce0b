#include "embedding.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "../cpu/embedding.h"
#include "embedding_tensors.h"
#include "gradients.h"
#include "layer_norm.h"
#include "tensors.h"

namespace fastbert {
at::Tensor embed_fwd_cpu(const std::optional<at::Tensor>& input_ids, const at::Tensor& position_ids,
                         const std::optional<at::Tensor>& token_type_ids, const at::Tensor& word,
                         const at::Tensor& position, const std::optional<at::Tensor>& token_type,
                         const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps) {
  const auto t =
      embed_fwd_tensors(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, at::kCPU);
  const int64_t tokens = t.out.size(0), width = t.out.size(1);
  for_dtype(t.out.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const EmbedFwd<T> args{{data<const T>(t.word), data<const T>(t.token_type), data<const T>(t.position)},
                           {data<const int64_t>(t.ids), data<const int64_t>(t.types), data<const int64_t>(t.positions)},
                           {1, 0, 0},
                           width,
                           data<T>(t.out)};
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width));
    std::function<void(int64_t, int64_t)> norm;
    if (t.weight.defined()) {
      norm = add_layer_norm_rows(t.out, at::Tensor(), at::Tensor(), t.weight, t.bias, eps, t.out);
    }
    at::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
      embed_fwd(args, begin, end);
      if (norm) norm(begin, end);
    });
  });
  return t.out;
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
