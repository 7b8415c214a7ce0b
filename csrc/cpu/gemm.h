// out = activation(x weight^T + bias) over weights that were packed once, in float32, bfloat16 or int8.
//
// What is summed is exact int32 for int8 and fp32 for the others. int8 (Dettmers et al. 2022, section 2.1: one scale a
// row of x, one a row of the weight): a row of x becomes round(x / scale) with scale = max|x| / 127, or with a scale
// that was given; the weight's scales are the caller's.
#pragma once

#include <cstdint>

#include "../include/activation.h"
#include "../include/bf16.h"

namespace fastbert {

constexpr int64_t kPanel = 64;  // columns of a packed panel

enum class DType { kFloat32, kBFloat16, kInt8 };

inline int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : dtype == DType::kBFloat16 ? 2 : 1; }

// Whether the ISA in use multiplies bfloat16. Without it bfloat16 operands are widened and multiplied in float32.
bool has_bf16_dot();

// The bytes of one panel: `in_features`, rounded up to whole steps of four bytes, times kPanel.
inline int64_t panel_bytes(DType format, int64_t in_features) {
  const int64_t per_step = 4 / element_size(format);
  return (in_features + per_step - 1) / per_step * kPanel * 4;
}

struct PackArgs {
  const void* weight;  // (out_features, in_features) in `dtype`, with strides in elements
  DType dtype;
  int64_t out_features, in_features, out_stride, in_stride;
  DType format;          // of the packed panels: float32 or bfloat16 from either, int8 from int8
  char* packed;          // (panels, panel_bytes), zeros beyond the weight
  int32_t* channel_offset;  // (panels * kPanel,), int8 only: 128 times the sums over in_features
};

void pack_panels(const PackArgs& args, int64_t begin, int64_t end);

struct PackedWeight {
  const char* packed;
  DType format;
  int64_t out_features, in_features;
  const int32_t* channel_offset;  // int8 only: what the rows' offset of 128 adds to every sum
  const float* channel_scale;  // int8 only, (out_features,)
  float input_scale;           // int8 only; 0 = measured row by row
};

// One product's right side and result. Several that share x share its conversion.
struct GemmTarget {
  PackedWeight weight;
  const void* bias;  // (out_features,) in `bias_dtype`, or null
  DType bias_dtype;
  Activation activation;
  void* out;      // (rows, out_features), row stride in elements
  void* pre;      // the same before the activation, or null
  int64_t out_stride;
};

struct GemmArgs {
  const void* x;  // (rows, in_features), row stride in elements
  DType x_dtype;
  int64_t x_stride;
  DType out_dtype;
  const GemmTarget* targets;
  int64_t num_targets;
};

// Rows [row_begin, row_end) of the panels [panel_begin, panel_end), counted through all targets.
void gemm(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end);

inline int64_t num_panels(int64_t out_features) { return (out_features + kPanel - 1) / kPanel; }

}  // namespace fastbert
