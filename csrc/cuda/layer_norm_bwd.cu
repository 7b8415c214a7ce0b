#include "column_sums.h"
#include "layer_norm.h"
#include "row.h"

namespace fastbert {
namespace {

// Two blocks for each of a large GPU's 132 processors: enough loads in flight, and shares that are small beside the
// matrices.
constexpr int64_t kMaxShares = 264;

// The vectors' gradients take three registers a column: rows of more than 768 columns are shared by several warps, at
// most kMaxThreads.
constexpr int kMaxThreads = 256;

int per_thread_of(int hidden_size) {
  if (hidden_size <= 256) return 8;
  if (hidden_size > 16 * kMaxThreads) return 32;
  return hidden_size > 512 && hidden_size <= 768 ? 24 : 16;
}

dim3 block_of(int hidden_size, int per_thread) {
  const unsigned threads = 32 * ceil_div(hidden_size, 32 * per_thread);
  return dim3(threads, threads < 128 ? 128 / threads : 1);
}

template <typename T, typename R>
__global__ void __launch_bounds__(kMaxThreads, 1) add_layer_norm_bwd_kernel(AddLayerNormBwdArgs a) {
  constexpr int kPerThread = R::kPerThread;
  const R columns{a.hidden_size};
  const float inverse = 1.0f / static_cast<float>(a.hidden_size);
  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  float dweight[kPerThread] = {}, dbias[kPerThread] = {}, dx_bias[kPerThread] = {};

  int slots = 0;
  // The rows of a block begin and end together: add_over_row has a barrier. Those beyond the last are all zeros.
  for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < a.rows; first += int64_t{gridDim.x} * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const bool inside = row < a.rows;
    const auto dout = inside ? columns.load(a.dout, row) : columns.zeros();
    const auto summed = inside ? columns.load(a.summed, row) : columns.zeros();
    const auto weight = columns.load(a.weight, 0);  // again for each row: it has no registers to stay in
    const float mean = inside && a.mean != nullptr ? a.mean[row] : 0.0f, rstd = inside ? a.rstd[row] : 0.0f;

    float xhat[kPerThread], dxhat[kPerThread], sums[2] = {0.0f, 0.0f};  // of dxhat * xhat, and of dxhat
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      xhat[i] = columns.has(i) ? (summed[i] - mean) * rstd : 0.0f;
      dxhat[i] = dout[i] * weight[i];
      sums[0] += dxhat[i] * xhat[i];
      sums[1] += dxhat[i];
      dweight[i] += dout[i] * xhat[i];
      dbias[i] += dout[i];
    }
    add_over_row(sums, shared + slots);
    slots = threads / 16 - slots;  // two floats a warp; the others may still be read
    const float along_xhat = sums[0] * inverse, along_ones = a.mean == nullptr ? 0.0f : sums[1] * inverse;

    // Chunk by chunk: what a whole row needs here would not fit in the registers beside what is added up.
#pragma unroll
    for (int c = 0; c < R::kChunks; ++c) {
      float gradient[R::kSize];
      Chunk<T> rounded{};
      if (a.dsum != nullptr && inside) rounded = columns.load(a.dsum, row, c);
#pragma unroll
      for (int j = 0; j < R::kSize; ++j) {
        const int i = c * R::kSize + j;
        gradient[j] = (dxhat[i] - along_ones - xhat[i] * along_xhat) * rstd + to_float(rounded.values[j]);
        rounded.values[j] = from_float<T>(gradient[j]);
      }
      if (inside) columns.store(a.dsummed, row, c, rounded);
      if (a.dx != nullptr) {
#pragma unroll
        for (int j = 0; j < R::kSize; j += 4) columns.drop_four(a.dropout, row, c * R::kSize + j, gradient + j);
#pragma unroll
        for (int j = 0; j < R::kSize; ++j) rounded.values[j] = from_float<T>(gradient[j]);
        if (inside) columns.store(a.dx, row, c, rounded);
      }
#pragma unroll
      for (int j = 0; j < R::kSize; ++j) dx_bias[c * R::kSize + j] += gradient[j];
    }
  }

  // What the block's rows have added up, vector after vector.
  const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  float* share = a.shares + int64_t{blockIdx.x} * 3 * a.hidden_size;
#pragma unroll
  for (int which = 0; which < 3; ++which) {
    if (which == 2 && a.dx_bias == nullptr) return;
    const float (&vector)[kPerThread] = which == 0 ? dweight : which == 1 ? dbias : dx_bias;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) shared[i * threads + thread] = vector[i];
    __syncthreads();
    if (threadIdx.y > 0) continue;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      float sum = vector[i];
      for (int other = thread + static_cast<int>(blockDim.x); other < threads; other += static_cast<int>(blockDim.x)) {
        sum += shared[i * threads + other];
      }
      if (columns.column(i) < a.hidden_size) share[int64_t{which} * a.hidden_size + columns.column(i)] = sum;
    }
  }
}

struct Launch {
  const AddLayerNormBwdArgs& args;
  cudaStream_t stream;

  template <typename T>
  cudaError_t run() const {
    const bool wide =
        is_wide(args.dtype, args.hidden_size, args.dout, args.dsum, args.summed, args.weight, args.dx, args.dsummed);
    if (!wide) {
      return args.hidden_size <= 16 * kMaxThreads ? as<T, Row<T, 16, false>>() : as<T, Row<T, 32, false>>();
    }
    switch (per_thread_of(args.hidden_size)) {
      case 8:
        return as<T, Row<T, 8, true>>();
      case 16:
        return as<T, Row<T, 16, true>>();
      case 24:
        return as<T, Row<T, 24, true>>();
      default:
        return as<T, Row<T, 32, true>>();
    }
  }

  template <typename T, typename R>
  cudaError_t as() const {
    const dim3 block = block_of(args.hidden_size, R::kPerThread);
    const dim3 grid(static_cast<unsigned>(add_layer_norm_bwd_shares(args.rows, args.hidden_size)));
    const size_t floats = R::kPerThread * block.x * block.y;  // more than the slots of add_over_row
    return launch(add_layer_norm_bwd_kernel<T, R>, grid, block, floats, args, stream);
  }
};

}  // namespace

int64_t add_layer_norm_bwd_shares(int64_t rows, int hidden_size) {
  const int64_t tiles = hidden_size == 0 ? 0 : ceil_div(rows, block_of(hidden_size, per_thread_of(hidden_size)).y);
  return tiles < kMaxShares ? tiles : kMaxShares;
}

cudaError_t launch_add_layer_norm_bwd(const AddLayerNormBwdArgs& args, cudaStream_t stream) {
  const int64_t num_shares = add_layer_norm_bwd_shares(args.rows, args.hidden_size);
  if (num_shares > 0) {
    const cudaError_t error = for_dtype(args.dtype, Launch{args, stream});
    if (error != cudaSuccess) return error;
  }
  return launch_column_sums(
      {args.dtype, args.shares, num_shares, 3, args.hidden_size, {args.dweight, args.dbias, args.dx_bias}}, stream);
}

}  // namespace fastbert
