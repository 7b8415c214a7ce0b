// Written by fastbert.ops.layers.layer_numbers.write, whose LayerNumbers says what these are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastbert {

struct LayerNumbers {
  static constexpr size_t kInts = 16, kFloats = 11;

  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t window_left;
  int64_t window_right;
  int64_t rotary;
  bool norm_first;
  bool merged_qkv;
  bool gated;
  bool merged_gate;
  int64_t norm;
  int64_t head_norm;
  int64_t biases;
  int64_t scales;
  int64_t norms;
  int64_t relative;
  double softmax_scale;
  double attention_norm_eps;
  double feed_forward_norm_eps;
  double query_norm_eps;
  double key_norm_eps;
  double attention_output_norm_eps;
  double feed_forward_output_norm_eps;
  double attention_dropout;
  double attention_output_dropout;
  double inner_dropout;
  double feed_forward_dropout;

  static LayerNumbers read(const int64_t* ints, const double* floats) {
    LayerNumbers numbers;
    numbers.num_heads = ints[0];
    numbers.num_kv_heads = ints[1];
    numbers.head_dim = ints[2];
    numbers.window_left = ints[3];
    numbers.window_right = ints[4];
    numbers.rotary = ints[5];
    numbers.norm_first = ints[6] != 0;
    numbers.merged_qkv = ints[7] != 0;
    numbers.gated = ints[8] != 0;
    numbers.merged_gate = ints[9] != 0;
    numbers.norm = ints[10];
    numbers.head_norm = ints[11];
    numbers.biases = ints[12];
    numbers.scales = ints[13];
    numbers.norms = ints[14];
    numbers.relative = ints[15];
    numbers.softmax_scale = floats[0];
    numbers.attention_norm_eps = floats[1];
    numbers.feed_forward_norm_eps = floats[2];
    numbers.query_norm_eps = floats[3];
    numbers.key_norm_eps = floats[4];
    numbers.attention_output_norm_eps = floats[5];
    numbers.feed_forward_output_norm_eps = floats[6];
    numbers.attention_dropout = floats[7];
    numbers.attention_output_dropout = floats[8];
    numbers.inner_dropout = floats[9];
    numbers.feed_forward_dropout = floats[10];
    return numbers;
  }
};

}  // namespace fastbert
