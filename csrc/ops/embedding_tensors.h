// The tensors of embed_layer_norm's forward, checked and allocated as every backend does it. Absent ones are undefined.
#pragma once

#include <ATen/ops/empty.h>

#include "tensors.h"

namespace fastbert {

struct EmbedFwdTensors {
  at::Tensor ids, positions, types, word, position, token_type, weight, bias;
  at::Tensor out;
};

inline EmbedFwdTensors embed_fwd_tensors(const std::optional<at::Tensor>& input_ids, const at::Tensor& position_ids,
                                         const std::optional<at::Tensor>& token_type_ids, const at::Tensor& word,
                                         const at::Tensor& position, const std::optional<at::Tensor>& token_type,
                                         const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
                                         at::Device device) {
  const int64_t tokens = position_ids.numel(), width = position.size(-1);
  const auto dtype = position.scalar_type();
  EmbedFwdTensors t;
  t.ids = checked("input_ids", input_ids, {tokens}, at::kLong, device);
  t.positions = checked("position_ids", position_ids, {tokens}, at::kLong, device);
  t.types = checked("token_type_ids", token_type_ids, {tokens}, at::kLong, device);
  t.word = checked("word", word, {input_ids.has_value() ? word.size(0) : tokens, width}, dtype, device);
  t.position = checked("position", position, {position.size(0), width}, dtype, device);
  if (token_type.has_value()) {
    t.token_type = checked("token_type", *token_type, {token_type->size(0), width}, dtype, device);
  }
  for (const at::Tensor& table : {t.word, t.position, t.token_type}) {
    TORCH_CHECK_INDEX(tokens == 0 || !table.defined() || table.size(0) > 0,
                      "embed_layer_norm: a table has no rows, for ", tokens, " tokens");
  }
  t.weight = checked("weight", weight, {width}, dtype, device);
  t.bias = checked("bias", bias, {width}, dtype, device);
  t.out = at::empty({tokens, width}, t.position.options());
  return t;
}

}  // namespace fastbert
