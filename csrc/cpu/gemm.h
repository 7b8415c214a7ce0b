// out = activation(x weight^T + bias) over weights that were packed once, in float32, bfloat16 or int8.
//
// What is summed is exact int32 for int8 and fp32 for the others. int8 (Dettmers et al. 2022, section 2.1: one scale a
// row of x, one a row of the weight): a row of x becomes round(x / scale) with scale = max|x| / 127, or with a scale
// that was given; the weight's scales are the caller's.
#pragma once

#include <cstdint>

#include "../include/activation.h"
#include "../include/bf16.h"
#include "../include/dropout.h"

namespace fastbert {

constexpr int64_t kPanel = 64;  // columns of a packed panel

enum class DType { kFloat32, kBFloat16, kInt8 };

// So many products of bytes, the largest 127 * 128, are summed without passing 2^31. While a sum is made, the rows'
// offset of 128 may take it further: it wraps, and comes back as the offset is taken out.
constexpr int64_t kMostInt8Columns = (int64_t{1} << 31) / (127 * 128) - 1;

inline int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : dtype == DType::kBFloat16 ? 2 : 1; }

// Whether products were written for the ISA in use. Without them they are torch's (ops/torch_products.h).
bool has_products();

// Whether the ISA in use multiplies bfloat16. Without it bfloat16 operands are widened and multiplied in float32.
bool has_bf16_dot();

// Rows that the ISA's tiles take at once where a part of a tile costs as much as a whole one, else 1: blocks of rows
// begin at its multiples.
int64_t row_group();

// The bytes of one panel: `in_features`, rounded up to whole steps of four bytes, times kPanel.
inline int64_t panel_bytes(DType format, int64_t in_features) {
  const int64_t per_step = 4 / element_size(format);
  return (in_features + per_step - 1) / per_step * kPanel * 4;
}

struct PackArgs {
  const void* weight;  // (out_features, in_features) in `dtype`; strides in elements, one of them 1
  DType dtype;
  int64_t out_features, in_features, out_stride, in_stride;
  DType format;             // of the packed panels: float32 or bfloat16 from either, int8 from int8
  char* packed;             // (panels, panel_bytes), zeros beyond the weight
  int32_t* channel_offset;  // (panels * kPanel,), int8 only: 128 times the sums over in_features; may be null
  bool streams = false;     // from float32 only: past the caches, `packed` being a multiple of 64
};

void pack_panels(const PackArgs& args, int64_t begin, int64_t end);

// out[c] = the sum of column c of a panel, float32 or bfloat16, of which `columns` are there and that was packed from
// `in_features` elements a column: a product with ones, from memory that the packing has just written.
void panel_sums(const char* panel, DType format, int64_t in_features, void* out, DType out_dtype, int64_t columns);

// vpmaddubsw, which multiplies bytes where there are no dot products of them, adds two products in 16 bits. They
// overflow where two weights of one sign are larger than 128 together: 255 x 128 fits. So panels are split: they keep
// as much of a pair as fits, and what is left is multiplied apart (residuals_body.h). Sums stay exact. Of trained and
// of normal weights 1 to 3 % of the pairs are split (docs/notes/gemm.md).
struct Residual {
  int32_t step;
  int8_t bytes[4];
};

// Of a packed weight: those of column c are [begin[c], begin[c + 1]).
struct Residuals {
  const int32_t* begin = nullptr;  // (panels * kPanel + 1,); null: the panels are whole
  const Residual* values = nullptr;
};

// Whether the ISA in use wants int8 panels split.
bool splits_bytes();

// `begin` (panels * kPanel + 1,) receives where the residuals of each column of a weight begin.
void count_residuals(const PackArgs& args, int32_t* begin);

// Takes the residuals out of the panels [first, last), of `steps` steps each, into `values`, all of the weight's; null
// where they are known.
void split_panels(char* packed, int64_t steps, int64_t first, int64_t last, const int32_t* begin, Residual* values);

struct PackedWeight {
  const char* packed;  // its panels; null: each is packed from `source` when it is multiplied with
  DType format;
  int64_t out_features, in_features;
  const int32_t* channel_offset;  // int8 only: what the rows' offset of 128 adds to every sum
  const float* channel_scale;     // int8 only, (out_features,)
  float input_scale;              // int8 only; 0 = measured row by row
  PackArgs source{};              // the weight itself, where there are no panels; not for int8
  Residuals residuals{};          // int8 only
};

// Whether rows that were converted for one weight serve another.
inline bool takes_same_rows(const PackedWeight& a, const PackedWeight& b) {
  return a.format == b.format && a.input_scale == b.input_scale;
}

// Rows (total_tokens, features), row stride in elements. int8 rows are convert_rows' own and have its scales.
struct RowsArg {
  const void* data;
  DType dtype;
  int64_t stride;
  const float* scales = nullptr;
};

// The stride in bytes of rows in a weight's format: whole steps of four bytes.
inline int64_t row_bytes(DType format, int64_t in_features) { return (in_features * element_size(format) + 3) / 4 * 4; }

// Rows [begin, end) of x in the weight's format, into the same rows of `out`, row_bytes apart; `scales` (rows,) for
// int8. gemm does it by itself: this is for a product whose tasks would all convert the same rows.
void convert_rows(const RowsArg& x, int64_t begin, int64_t end, const PackedWeight& weight, char* out, float* scales);

// Another product that is added to the first before anything else happens to the sum; not for int8.
struct GemmAddend {
  RowsArg x;
  PackedWeight weight;
};

// One product's right side and result. Several that share x share its conversion. Pointers may be null; results are
// (rows, out_features), strides in elements.
struct GemmTarget {
  PackedWeight weight;
  const GemmAddend* addends;
  int64_t num_addends;
  const void* bias;  // (out_features,)
  DType bias_dtype;
  Activation activation;
  void* out;
  int64_t out_stride;
  void* pre;  // receives the sum before the activation
  int64_t pre_stride;
  // Gated: another product of x, of as many columns, with its own bias, activation and pre, but without addends and
  // out. Here out = activation(its sum) * this sum, and the panels that are counted are this one's.
  const GemmTarget* gate;
  // Backward, where forward had activation(slope_of): out = sum * activation'(slope_of), and `activated`, without gaps,
  // receives activation(slope_of). Gated, slope_of and out have the gate's columns and, up_offset further, what it was
  // multiplied with.
  const void* slope_of;
  void* activated;
  int64_t up_offset;
  // Of what activation and gate leave, in backward of the sum and of `activated`. Row 0 is the mask's row dropout_row.
  const Dropout* dropout;
  int64_t dropout_row;
};

struct GemmArgs {
  RowsArg x;
  DType out_dtype;  // of everything that a target points to, but for its bias
  const GemmTarget* targets;
  int64_t num_targets;
  const char* next = nullptr;  // a panel that is read after the last one, of another product; null: unknown
};

// Rows [row_begin, row_end) of the panels [panel_begin, panel_end), counted through all targets.
void gemm(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end);

// What a target says of its sums, done to sums that were made elsewhere: (rows, out_features), and its gate's likewise.
// They may lie where its result will. For instruction sets without products of their own.
struct FinishArgs {
  const GemmTarget& target;
  RowsArg sums, gate_sums;
  DType out_dtype;
};

void finish_sums(const FinishArgs& args, int64_t row_begin, int64_t row_end);

// out (a_features, b_features) = a^T b, summed over tokens: a weight's gradient. Both were packed by pack_panels with
// tokens as in_features.
struct GemmTransposedArgs {
  const char* a;
  const char* b;
  DType format;
  int64_t tokens, a_features, b_features;
  void* out;  // contiguous
  DType out_dtype;
  double* squares = nullptr;  // (blocks,), or null: the sum of the squares of each block of out, row by row of blocks
};

// Blocks [begin, end) of kPanel x kPanel, in an order of its own.
void gemm_transposed(const GemmTransposedArgs& args, int64_t begin, int64_t end);

// out (columns,) = the sums over all rows of x, for the columns [begin, end): a bias's gradient.
void column_sums(const RowsArg& x, int64_t rows, void* out, DType out_dtype, int64_t begin, int64_t end);

// dpre = dout * activation'(pre), elementwise over [begin, end).
struct ActivationBwd {
  const void* dout;
  const void* pre;
  void* dpre;
  DType dtype;
  Activation activation;
};
void activation_bwd(const ActivationBwd& args, int64_t begin, int64_t end);

inline int64_t num_panels(int64_t out_features) { return (out_features + kPanel - 1) / kPanel; }

}  // namespace fastbert
