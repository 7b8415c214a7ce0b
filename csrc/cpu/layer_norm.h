// add_layer_norm and add_rms_norm on the CPU, over raw pointers. T is the storage type (float or BFloat16); all
// arithmetic is fp32.
//
//   summed = dropout(x + x_bias) + residual, rounded to T
//   out    = (summed - mean) * rstd * weight + bias
//
// RMSNorm is LayerNorm with a mean of 0: rstd is 1 / sqrt(mean(summed^2) + eps). Zero-centred, its weight is 1 +
// weight.
//
// Matrices are row-major (rows, hidden_size) without gaps; vectors are (hidden_size,); a null pointer leaves that
// operand or result out.
#pragma once

#include <cstdint>

#include "../include/bf16.h"
#include "../include/dropout.h"

namespace fastbert {

// In the order of fastbert/layer_spec.py's NormType; kNone: out is the sum itself.
enum class Norm { kLayer, kRms, kZeroCenteredRms, kNone };

// What is added to the weight.
inline float weight_offset(Norm norm) { return norm == Norm::kZeroCenteredRms ? 1.0f : 0.0f; }

template <typename T>
struct AddLayerNormFwd {
  Norm norm;
  const T* x;
  const T* x_bias;    // or null
  const T* residual;  // or null
  const T* weight;    // null: ones
  const T* bias;      // or null
  Dropout dropout;
  float eps;
  int64_t hidden_size;
  T* out;       // null only without a norm
  T* summed;    // or null
  float* mean;  // (rows,), or null, as it is for RMSNorm
  float* rstd;  // (rows,), or null
};

// Rows [begin, end). Rows are independent: how they are split over threads never shows in the result.
void add_layer_norm_fwd(const AddLayerNormFwd<float>& args, int64_t begin, int64_t end);
void add_layer_norm_fwd(const AddLayerNormFwd<BFloat16>& args, int64_t begin, int64_t end);

template <typename T>
struct AddLayerNormBwd {
  const T* dout;
  const T* dout_more;  // added to dout, or null
  const T* dsum;       // or null
  const T* summed;
  const float* mean;  // null: RMSNorm
  const float* rstd;
  const T* weight;
  float weight_offset;  // added to it
  Dropout dropout;
  int64_t rows;
  int64_t hidden_size;
  int64_t rows_per_chunk;
  T* dx;  // null without dropout: dx is then dsummed
  T* dsummed;
  float* partial;  // (chunks, 3, hidden_size): each chunk's share of dweight, dbias and dx_bias
};

// Chunks [begin, end) of rows_per_chunk rows each. A chunk is one thread's, summed in row order.
template <typename T>
void add_layer_norm_bwd(const AddLayerNormBwd<T>& args, int64_t begin, int64_t end);

template <typename T>
struct ColumnSums {
  const float* partial;  // (chunks, 3, hidden_size)
  int64_t chunks;
  int64_t hidden_size;
  T* out[3];  // dweight, dbias, dx_bias; null leaves one out
};

// Columns [begin, end) of the three sums, chunk after chunk.
template <typename T>
void add_column_sums(const ColumnSums<T>& args, int64_t begin, int64_t end);

}  // namespace fastbert
