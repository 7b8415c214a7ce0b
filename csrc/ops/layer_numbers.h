// Written by fastbert.ops.layers.layer_numbers.write, whose LayerNumbers says what these are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastbert {

struct LayerNumbers {
  static constexpr size_t kInts = 15, kFloats = 7;

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
  bool rms;
  int64_t biases;
  int64_t scales;
  int64_t norms;
  int64_t relative;
  double softmax_scale;
  double attention_norm_eps;
  double feed_forward_norm_eps;
  double attention_dropout;
  double attention_output_dropout;
  double inner_dropout;
  double feed_forward_dropout;

  static LayerNumbers read(const int64_t* ints, const double* floats) {
    LayerNumbers made;
    made.num_heads = ints[0];
    made.num_kv_heads = ints[1];
    made.head_dim = ints[2];
    made.window_left = ints[3];
    made.window_right = ints[4];
    made.rotary = ints[5];
    made.norm_first = ints[6] != 0;
    made.merged_qkv = ints[7] != 0;
    made.gated = ints[8] != 0;
    made.merged_gate = ints[9] != 0;
    made.rms = ints[10] != 0;
    made.biases = ints[11];
    made.scales = ints[12];
    made.norms = ints[13];
    made.relative = ints[14];
    made.softmax_scale = floats[0];
    made.attention_norm_eps = floats[1];
    made.feed_forward_norm_eps = floats[2];
    made.attention_dropout = floats[3];
    made.attention_output_dropout = floats[4];
    made.inner_dropout = floats[5];
    made.feed_forward_dropout = floats[6];
    return made;
  }
};

}  // namespace fastbert
