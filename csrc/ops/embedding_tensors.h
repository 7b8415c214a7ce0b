// The tensors of embed_layer_norm's forward, checked as every backend does it. Absent ones are undefined.
#pragma once

#include "tensors.h"

namespace fastbert {

struct EmbedFwdTensors {
  Array ids, positions, types, word, position, token_type, weight, bias;
  Shape out_sizes;
};

inline EmbedFwdTensors embed_fwd_tensors(const OptionalArray& input_ids, const OptionalArray& position_ids,
                                         const OptionalArray& token_type_ids, const Array& word,
                                         const OptionalArray& position, const OptionalArray& token_type,
                                         const OptionalArray& weight, const OptionalArray& bias, Device device) {
  check(position_ids.defined() == position.defined(), "position_ids and their table belong together");
  const Array& one_a_token = position_ids.defined() ? position_ids : input_ids.defined() ? input_ids : word;
  const int64_t tokens = one_a_token.size(0), width = (position.defined() ? position : word).size(1);
  const auto dtype = word.scalar_type();
  EmbedFwdTensors t;
  t.ids = checked_if_defined("input_ids", input_ids, {tokens}, ScalarType::Long, device);
  t.positions = checked_if_defined("position_ids", position_ids, {tokens}, ScalarType::Long, device);
  t.types = checked_if_defined("token_type_ids", token_type_ids, {tokens}, ScalarType::Long, device);
  t.word = checked("word", word, {input_ids.defined() ? word.size(0) : tokens, width}, dtype, device);
  t.position = checked_if_defined("position", position, {position.size(0), width}, dtype, device);
  t.token_type = checked_if_defined("token_type", token_type, {token_type.size(0), width}, dtype, device);
  for (const Array& table : {t.word, t.position, t.token_type}) {
    check_index(tokens == 0 || !table.defined() || table.size(0) > 0, "embed_layer_norm: a table has no rows, for ",
                tokens, " tokens");
  }
  t.weight = checked_if_defined("weight", weight, {width}, dtype, device);
  t.bias = checked_if_defined("bias", bias, {width}, dtype, device);
  t.out_sizes = {tokens, width};
  return t;
}

}  // namespace fastbert
