#include "embedding.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "../cpu/embedding.h"
#include "embedding_tensors.h"
#include "gradients.h"
#include "layer_norm.h"
#include "tensors.h"
#include "workspace.h"

namespace fastbert {
namespace {

// Before anything is written: every id is a row of its table. One comparison an id, beside the rows that it stands for.
void check_ids(const char* name, const Array& ids, int64_t rows) {
  if (!ids.defined()) return;
  const auto* id = ids.data<const int64_t>();
  const int64_t tokens = ids.numel();
  const auto is_outside = [&](int64_t i) { return static_cast<uint64_t>(id[i]) >= static_cast<uint64_t>(rows); };
  bool any = false;
  for (int64_t i = 0; i < tokens; ++i) any |= is_outside(i);
  for (int64_t i = 0; any && i < tokens; ++i) {
    check_index(!is_outside(i), "embed_layer_norm: ", name, " holds ", id[i], "; valid values are 0 to ", rows - 1);
  }
}

// Into `out`.
void embed(const EmbedFwdTensors& t, double eps, const Array& out) {
  const int64_t tokens = out.size(0), width = out.size(1);
  check_ids("input_ids", t.ids, t.word.size(0));
  if (t.position.defined()) check_ids("position_ids", t.positions, t.position.size(0));
  if (t.token_type.defined()) check_ids("token_type_ids", t.types, t.token_type.size(0));
  for_dtype(out.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const EmbedFwd<T> args{
        {t.word.data<const T>(), t.token_type.data<const T>(), t.position.data<const T>()},
        {t.ids.data<const int64_t>(), t.types.data<const int64_t>(), t.positions.data<const int64_t>()},
        {1, 0, 0},
        width,
        out.data<T>()};
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width));
    RowsDone norm;
    if (t.weight.defined()) norm = add_norm_rows(out, {}, {}, {Norm::kLayer, t.weight, t.bias, eps}, out, {});
    parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
      embed_fwd(args, begin, end);
      if (norm) norm(begin, end);
    });
  });
}

}  // namespace

Array embed_into(MakeArray make, const OptionalArray& input_ids, const OptionalArray& position_ids,
                 const OptionalArray& token_type_ids, const Array& word, const OptionalArray& position,
                 const OptionalArray& token_type, const OptionalArray& weight, const OptionalArray& bias, double eps) {
  const auto t =
      embed_fwd_tensors(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, cpu());
  const Array out = make(t.out_sizes, t.word.scalar_type());
  embed(t, eps, out);
  return out;
}

Array embed_fwd_cpu(const OptionalArray& input_ids, const OptionalArray& position_ids,
                    const OptionalArray& token_type_ids, const Array& word, const OptionalArray& position,
                    const OptionalArray& token_type, const OptionalArray& weight, const OptionalArray& bias,
                    double eps) {
  return embed_into(empty, input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, eps);
}

Array embed_bwd_cpu(const Array& dout_, const Array& ids_, const Array& table, int64_t padding_idx) {
  check(table.dim() == 2, "table has shape ", table.sizes(), ", expected (rows, width)");
  const int64_t tokens = ids_.numel(), width = table.size(1);
  const Array dout = checked("dout", dout_, {tokens, width}, table.scalar_type());
  const Array ids = checked("ids", ids_, {tokens}, ScalarType::Long);
  check_ids("ids", ids, table.size(0));
  const auto* id = ids.data<const int64_t>();
  std::vector<int64_t> order(static_cast<size_t>(tokens));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return id[a] != id[b] ? id[a] < id[b] : a < b; });
  const Array dtable = new_gradient(table).gradient;
  auto* bytes = static_cast<char*>(dtable.data());
  parallel_for(0, static_cast<int64_t>(dtable.nbytes()), 1 << 18,
               [&](int64_t begin, int64_t end) { std::memset(bytes + begin, 0, static_cast<size_t>(end - begin)); });
  for_dtype(table.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const EmbedBwd<T> args{dout.data<const T>(), order.data(), id, tokens, width, padding_idx, dtable.data<T>()};
    parallel_for(0, width, 64, [&](int64_t begin, int64_t end) { embed_bwd(args, begin, end); });
  });
  return dtable;
}

}  // namespace fastbert
