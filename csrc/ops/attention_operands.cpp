#include "attention_operands.h"

#include "offsets.h"

namespace fastbert {
namespace {

constexpr int64_t kLargestHeadDim = 256;

std::vector<int64_t> offsets_of(const Array& cu_seqlens, int64_t total_tokens) {
  const Array words = checked_offsets(cu_seqlens, total_tokens);
  const auto* from = words.data<const int32_t>();
  return {from, from + words.size(0)};
}

Array checked_table(const char* name, const Array& table, const Operands& operands) {
  const int64_t half = operands.q.size(2) / 2, rows = table.dim() == 2 ? table.size(0) : 0;
  check(operands.q.size(2) % 2 == 0, "head_dim is ", operands.q.size(2), ", which rotary embedding cannot halve");
  check_tensor(name, table, {rows, half}, ScalarType::Float, cpu());
  if (operands.options->by_token) {
    check(rows == operands.total_tokens, name, " has ", rows, " rows, expected one for each of ", operands.total_tokens,
          " tokens");
  }
  for (size_t i = 1; !operands.options->by_token && i < operands.offsets.size(); ++i) {
    const int64_t length = operands.offsets[i] - operands.offsets[i - 1];
    check(rows >= length, name, " has ", rows, " positions, sequence ", i - 1, " has ", length, " tokens");
  }
  return half <= 1 || table.stride(1) == 1 ? table : contiguous(table);
}

}  // namespace

Array with_rows(const char* name, const Array& t, const Shape& sizes, const Array& like) {
  check(t.is_cpu(), name, " is on ", t.device(), ", expected cpu");
  check(t.sizes() == sizes, name, " has shape ", t.sizes(), ", expected ", sizes);
  check(t.scalar_type() == like.scalar_type(), name, " is ", t.scalar_type(), ", expected ", like.scalar_type());
  return t.size(2) <= 1 || t.stride(2) == 1 ? t : contiguous(t);
}

Operands checked_operands(const Array& q, const Array& k, const Array& v, const Array& cu_seqlens,
                          const AttentionOptions& options, const Dropout& dropout) {
  check(q.dim() == 3, "q has shape ", q.sizes(), ", expected (total_tokens, num_heads, head_dim)");
  check(q.size(2) <= kLargestHeadDim, "head_dim is ", q.size(2), ", expected at most ", kLargestHeadDim);
  check(k.dim() == 3, "k has shape ", k.sizes(), ", expected (total_tokens, num_kv_heads, head_dim)");
  const int64_t num_heads = q.size(1), num_kv_heads = k.size(1);
  check(num_kv_heads > 0 ? num_heads % num_kv_heads == 0 : num_heads == 0, "q has ", num_heads, " heads, which the ",
        num_kv_heads, " of k do not divide");
  Operands operands;
  operands.total_tokens = q.size(0), operands.num_heads = num_heads, operands.num_kv_heads = num_kv_heads;
  operands.options = &options, operands.dropout = dropout;
  const Shape sizes{q.size(0), num_kv_heads, q.size(2)};
  operands.q = with_rows("q", q, q.sizes(), q);
  operands.k = with_rows("k", k, sizes, q);
  operands.v = with_rows("v", v, sizes, q);
  operands.offsets = offsets_of(cu_seqlens, q.size(0));
  operands.seen = seen_keys(operands.offsets, q.size(0), options);
  if (options.cos.defined()) {
    operands.cos = checked_table("cos", options.cos, operands);
    operands.sin = checked_table("sin", options.sin, operands);
  }
  return operands;
}

}  // namespace fastbert
