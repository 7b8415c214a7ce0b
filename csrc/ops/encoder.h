// A whole encoder, from ids to its last hidden states or to what is pooled of them, for inference: the registered
// operators of the CPU backend, whose schemas are in fastbert/ops/layers/encoder.py.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "register.h"

namespace fastbert {

// Keeps the tensors of an encoder, and gives it a number. That hundreds of them need not be handed over with each text
// is what this is for: a call reads where they lie and what they are anew.
int64_t hold_encoder_cpu(const List<OptionalArray>& embeddings, double eps, int64_t first_position,
                         const List<Array>& weights, const List<Array>& biases, const List<Array>& weight_scales,
                         const List<Array>& input_scales, const List<Array>& norms, const std::string& activation,
                         const std::vector<int64_t>& layers, const std::vector<int64_t>& ints,
                         const std::vector<double>& floats, const std::optional<double>& final_eps,
                         const List<OptionalArray>& pooler);

// What is asked for, and with `pools` what the pooler makes of each sequence's first token.
std::vector<Array> encoder_cpu(const Array& input_ids, const OptionalArray& token_type_ids,
                               const OptionalArray& position_ids, const Array& cu_seqlens, int64_t encoder,
                               const std::vector<int64_t>& versions, bool infers, const std::string& pooling,
                               const std::optional<double>& normalize_eps, bool pools);

// Lets go of the tensors: of an encoder that is not run any more.
void forget_encoder(int64_t encoder);

}  // namespace fastbert
