#include "feed_forward.h"

#include "activation.h"
#include "chunk.h"
#include "column_sums.h"

namespace fastbert {
namespace {

// A thread has one chunk of columns and walks down a tile of rows, so that bias is read, and dbias added up, once a
// tile. The loads of kAtOnce rows are in flight together.
constexpr int kThreads = 128;

template <typename T, bool kWide>
__global__ void __launch_bounds__(kThreads) bias_activation_fwd_kernel(BiasActivationFwdArgs a) {
  constexpr int kSize = Chunk<T>::kSize, kAtOnce = 4;
  const int64_t column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kSize, count = a.columns - column;
  if (count <= 0) return;
  T* const matrix = static_cast<T*>(a.pre) + column;
  T* const inner = static_cast<T*>(a.inner) + column;
  const int64_t first = int64_t{blockIdx.x} * kAtOnce;
  Chunk<T> pre[kAtOnce];
#pragma unroll
  for (int r = 0; r < kAtOnce; ++r) {
    pre[r] = load_chunk<kWide>(matrix + (first + r) * a.columns, first + r < a.rows ? count : 0);
  }
  if (a.bias != nullptr) {
    const Chunk<T> bias = load_chunk<kWide>(static_cast<const T*>(a.bias) + column, count);
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        pre[r].values[i] = from_float<T>(to_float(pre[r].values[i]) + to_float(bias.values[i]));
      }
      store_chunk<kWide>(matrix + (first + r) * a.columns, first + r < a.rows ? count : 0, pre[r]);
    }
  }
  with_activation(a.activation, [&](auto activation) {
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        pre[r].values[i] = from_float<T>(activate<decltype(activation)::value>(to_float(pre[r].values[i])));
      }
    }
  });
#pragma unroll
  for (int r = 0; r < kAtOnce; ++r) {
    store_chunk<kWide>(inner + (first + r) * a.columns, first + r < a.rows ? count : 0, pre[r]);
  }
}

// At most 256 shares of dbias, which are small beside the matrices; at least 16 rows each.
int64_t rows_per_share(int64_t rows) {
  const int64_t spread = (rows + 255) / 256;
  return spread < 16 ? 16 : (spread + 1) / 2 * 2;
}

struct Tile {
  ActivationBwdArgs args;
  int64_t rows;
};

template <typename T, bool kWide>
__global__ void __launch_bounds__(kThreads) activation_bwd_kernel(Tile tile) {
  constexpr int kSize = Chunk<T>::kSize, kAtOnce = 2;
  const ActivationBwdArgs& a = tile.args;
  const int64_t column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kSize, count = a.columns - column;
  if (count <= 0) return;
  T* const matrix = static_cast<T*>(a.dinner) + column;
  const T* const pre_matrix = static_cast<const T*>(a.pre) + column;
  T* const inner = static_cast<T*>(a.inner) + column;
  float dbias[kSize] = {};
  const int64_t begin = int64_t{blockIdx.x} * tile.rows;
  for (int64_t first = begin; first < begin + tile.rows && first < a.rows; first += kAtOnce) {
    Chunk<T> dpre[kAtOnce], pre[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int64_t there = first + r < a.rows ? count : 0;
      dpre[r] = load_chunk<kWide>(matrix + (first + r) * a.columns, there);
      pre[r] = load_chunk<kWide>(pre_matrix + (first + r) * a.columns, there);
    }
    with_activation(a.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const float x = to_float(pre[r].values[i]);
          const float gradient = to_float(dpre[r].values[i]) * activation_slope<kActivation>(x);
          dbias[i] += gradient;
          dpre[r].values[i] = from_float<T>(gradient);
          pre[r].values[i] = from_float<T>(activate<kActivation>(x));
        }
      }
    });
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int64_t there = first + r < a.rows ? count : 0;
      store_chunk<kWide>(matrix + (first + r) * a.columns, there, dpre[r]);
      store_chunk<kWide>(inner + (first + r) * a.columns, there, pre[r]);
    }
  }
  if (a.dbias == nullptr) return;
  float* share = a.shares + int64_t{blockIdx.x} * a.columns + column;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (i < count) share[i] = dbias[i];
  }
}

dim3 grid_of(DType dtype, int64_t tiles, int64_t columns) {
  return dim3(static_cast<unsigned>(tiles), ceil_div(columns, kThreads * (dtype == DType::kFloat ? 4 : 8)));
}

struct LaunchFwd {
  const BiasActivationFwdArgs& args;
  cudaStream_t stream;

  template <typename T>
  cudaError_t run() const {
    const bool wide = is_wide(args.dtype, args.columns, args.pre, args.bias, args.inner);
    const auto kernel = wide ? bias_activation_fwd_kernel<T, true> : bias_activation_fwd_kernel<T, false>;
    const dim3 grid = grid_of(args.dtype, ceil_div(args.rows, 4), args.columns);
    return launch(kernel, grid, dim3(kThreads), 0, args, stream);
  }
};

struct LaunchBwd {
  const ActivationBwdArgs& args;
  cudaStream_t stream;

  template <typename T>
  cudaError_t run() const {
    const bool wide = is_wide(args.dtype, args.columns, args.dinner, args.pre, args.inner);
    const auto kernel = wide ? activation_bwd_kernel<T, true> : activation_bwd_kernel<T, false>;
    const dim3 grid = grid_of(args.dtype, activation_bwd_shares(args.rows), args.columns);
    return launch(kernel, grid, dim3(kThreads), 0, Tile{args, rows_per_share(args.rows)}, stream);
  }
};

}  // namespace

cudaError_t launch_bias_activation_fwd(const BiasActivationFwdArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.columns == 0) return cudaSuccess;
  return for_dtype(args.dtype, LaunchFwd{args, stream});
}

int64_t activation_bwd_shares(int64_t rows) { return ceil_div(rows, rows_per_share(rows)); }

cudaError_t launch_activation_bwd(const ActivationBwdArgs& args, cudaStream_t stream) {
  if (args.rows > 0 && args.columns > 0) {
    const cudaError_t error = for_dtype(args.dtype, LaunchBwd{args, stream});
    if (error != cudaSuccess) return error;
  }
  if (args.dbias == nullptr) return cudaSuccess;
  return launch_column_sums(
      {args.dtype, args.shares, activation_bwd_shares(args.rows), 1, args.columns, {args.dbias, nullptr, nullptr}},
      stream);
}

}  // namespace fastbert
