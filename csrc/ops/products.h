// One GEMM of the CPU backend, or several that share x: their operands, and how the threads share the work. linear.cpp
// and feed_forward.cpp are made of these.
#pragma once

#include <algorithm>
#include <functional>

#include "../cpu/gemm.h"
#include "../include/activation.h"
#include "array.h"
#include "packed_weights.h"

namespace fastbert {

// Called with rows [begin, end) of a product's result as soon as they are whole, by the thread that made them where
// that is possible: what comes next finds them in its cache.
using RowsDone = std::function<void(int64_t begin, int64_t end)>;

// What is multiplied with: weight (out_features, in_features), bias (out_features,), and for int8 its scales. They are
// the caller's: a stack of layers names hundreds.
struct LinearOperand {
  const Array& weight;
  const Array* bias;          // null, or undefined: there is none
  const Array* weight_scale;  // likewise
  const Array* input_scale;   // likewise; one float32, read at each call
  int64_t version;            // of the weight: packed_weights.h
  Comparison comparison;
};

// Rows that a thread takes through all panels, or through both products of a feed-forward, before it goes on: their x
// stays in the second-level cache, while the panels, which all threads read, stream from the third.
constexpr int64_t kRowBlock = 192;
// Tasks a thread that a product is split into, and rows below which it is not.
constexpr int64_t kTasks = 2, kFewRows = 32;
// Rows from which on a product does not keep its packed weight.
constexpr int64_t kManyRows = 2048;

// Whether each thread takes rows of its own through all of a weight. What it makes is then what it reads next, and
// where threads have no cache in common hardly anything moves between them. It takes rows enough for the arithmetic to
// last as long as the weight's way from memory, which every thread has to wait for; elsewhere threads share the weight.
bool shares_rows(int64_t rows, int64_t threads, const PackedWeight& weight);

// For as long as it lives, products of this thread are those of a stack of layers, whose weights take `bytes`, packed:
// few enough stay in a cache, and a thread has not to wait for them. One follows the other as they did the last time:
// where a thread comes to the end of its panels it fetches the first of those that it had then in the next product.
class StackProducts {
 public:
  explicit StackProducts(int64_t bytes);
  StackProducts(const StackProducts&) = delete;
  StackProducts& operator=(const StackProducts&) = delete;
  ~StackProducts();

 private:
  int64_t bytes_before_;
  size_t count_before_;
};

// What a thread reads after its group of panels of this product, which is split into so many groups of panels and
// blocks of rows: where its group of the next product's begins, as in the last stack, null where that is unknown. An
// element for each group. It may be gone, so it is fetched and never read. Notes where this product's begin.
const std::vector<const char*>& next_panels(const GemmArgs& args, int64_t groups, int64_t blocks);

// Blocks of rows of nearly equal size, at most kRowBlock each; as many for every thread. One for each where they
// `share_rows`.
int64_t num_blocks(int64_t rows, int64_t threads, bool share_rows);

// The first row of a block. No block grows beyond what it had before the rounding, up to a multiple of row_group().
int64_t first_row(int64_t block, int64_t blocks, int64_t rows);

// All of one GEMM, or of several that share x, over the threads.
void run_gemm(const GemmArgs& args, int64_t rows, const RowsDone& done = nullptr);

RowsArg rows_of(const Array& x);

// Whether a product of so many rows packs the weight on its way, panel by panel in the thread's cache, and keeps no
// copy: it reads the weight once, as it is now, where another would read the weight to compare it and then the copy.
// More rows are several blocks, each of which would pack for itself.
inline bool packs_on_its_way(int64_t rows, Comparison comparison) {
  return rows <= kRowBlock && comparison == Comparison::kWhole;
}

// Whether a product of so many rows packs all of the weight for itself, into memory that the next product uses again,
// and keeps no copy: beside its sums that takes nothing that could be measured (docs/gemm.md), and a copy is as large
// as the weight.
inline bool packs_for_itself(int64_t rows) { return rows >= kManyRows; }

// A weight with what its product needs beside it.
struct Operand {
  PackedMemory packed;          // of none where the product packs the weight itself
  Array panels;                 // what it has packed for itself
  Array bias_copy, scale_copy;  // of those with gaps
  Array source;                 // what the product packs on its way
  GemmTarget target{};

  // For a product of `rows` rows.
  Operand(const LinearOperand& linear, int64_t rows, int64_t in_features, ScalarType dtype);

  void write_to(const Array& out, const Array& pre, Activation activation);
};

// A weight of which rows or columns lie whole, as packing views of it needs.
Array with_whole_lines(const Array& weight);

// The right side of a gradient's product of `rows` rows.
Operand transposed(const Array& weight, int64_t rows, int64_t in_features, ScalarType dtype);

// x with its rows whole; their stride is free, so that a slice of a wider matrix needs no copy.
Array checked_x(const Array& x, ScalarType dtype);

GemmArgs gemm_args(const Array& x, ScalarType dtype, const GemmTarget* targets, int64_t num_targets);

// sums (features,) = those of x (tokens, features) over its tokens.
void sum_columns(const Array& x, const Array& sums);

// (tokens, features) packed along its tokens, for a weight's gradient. sums (features,), if defined, receives the sums
// over the tokens of what is packed.
Array pack_tokens(const Array& x, DType format, const Array& sums = Array());

// dout^T x in the weight's dtype, of operands that pack_tokens made.
Array weight_gradient(const Array& dout, const Array& x, DType format, int64_t tokens, const Array& weight);

}  // namespace fastbert
