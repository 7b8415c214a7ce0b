#include "feed_forward.h"

#include "activation.h"
#include "chunk.h"
#include "column_sums.h"

namespace fastbert {
namespace {

// A thread has one chunk of columns, of both halves where they are gated (kHalves is 2), and walks down a tile of rows,
// so that dbias is added up once a tile. The loads of kAtOnce rows are in flight together, and all of a row's stand
// before its first store: results may lie where operands did.
constexpr int kThreads = 128;

template <typename T, int kHalves, bool kWide>
__global__ void __launch_bounds__(kThreads) activation_fwd_kernel(ActivationFwdArgs a) {
  constexpr int kSize = Chunk<T>::kSize, kAtOnce = 4 / kHalves;
  const int64_t column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kSize, count = a.columns - column;
  if (count <= 0) return;
  const T* const matrix = static_cast<const T*>(a.pre) + column;
  T* const inner = static_cast<T*>(a.inner) + column;
  const int64_t first = int64_t{blockIdx.x} * kAtOnce;
  Chunk<T> pre[kAtOnce][kHalves];
#pragma unroll
  for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const T* const from = matrix + ((first + r) * kHalves + h) * a.columns;
      pre[r][h] = load_chunk<kWide>(from, first + r < a.rows ? count : 0);
    }
  }
  with_activation(a.activation, [&](auto activation) {
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        float value = activate<decltype(activation)::value, sizeof(T) == 2>(to_float(pre[r][0].values[i]));
        if constexpr (kHalves == 2) value *= to_float(pre[r][1].values[i]);
        pre[r][0].values[i] = from_float<T>(value);
      }
    }
  });
#pragma unroll
  for (int r = 0; r < kAtOnce; ++r) {
    store_chunk<kWide>(inner + (first + r) * a.columns, first + r < a.rows ? count : 0, pre[r][0]);
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

template <typename T, int kHalves, bool kWide>
__global__ void __launch_bounds__(kThreads) activation_bwd_kernel(Tile tile) {
  constexpr int kSize = Chunk<T>::kSize, kAtOnce = 2;
  const ActivationBwdArgs& a = tile.args;
  const int64_t column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kSize, count = a.columns - column;
  if (count <= 0) return;
  const T* const dinner_matrix = static_cast<const T*>(a.dinner) + column;
  const T* const pre_matrix = static_cast<const T*>(a.pre) + column;
  T* const dpre_matrix = static_cast<T*>(a.dpre) + column;
  T* const inner_matrix = static_cast<T*>(a.inner) + column;
  float dbias[kHalves][kSize] = {};
  const int64_t begin = int64_t{blockIdx.x} * tile.rows;
  for (int64_t first = begin; first < begin + tile.rows && first < a.rows; first += kAtOnce) {
    Chunk<T> inner[kAtOnce], pre[kAtOnce][kHalves];  // which begin as dinner and end as dpre
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int64_t there = first + r < a.rows ? count : 0;
      inner[r] = load_chunk<kWide>(dinner_matrix + (first + r) * a.columns, there);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        pre[r][h] = load_chunk<kWide>(pre_matrix + ((first + r) * kHalves + h) * a.columns, there);
      }
    }
    with_activation(a.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const float x = to_float(pre[r][0].values[i]), dinner = to_float(inner[r].values[i]);
          float value = activate<kActivation, sizeof(T) == 2>(x);
          float gradient = dinner * activation_slope<kActivation, sizeof(T) == 2>(x);
          if constexpr (kHalves == 2) {
            const float up = to_float(pre[r][1].values[i]), dup = dinner * value;
            dbias[1][i] += dup;
            pre[r][1].values[i] = from_float<T>(dup);
            value *= up;
            gradient *= up;
          }
          dbias[0][i] += gradient;
          pre[r][0].values[i] = from_float<T>(gradient);
          inner[r].values[i] = from_float<T>(value);
        }
      }
    });
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int64_t there = first + r < a.rows ? count : 0;
      store_chunk<kWide>(inner_matrix + (first + r) * a.columns, there, inner[r]);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        store_chunk<kWide>(dpre_matrix + ((first + r) * kHalves + h) * a.columns, there, pre[r][h]);
      }
    }
  }
  if (a.dbias == nullptr) return;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    float* const share = a.shares + (int64_t{blockIdx.x} * kHalves + h) * a.columns + column;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i < count) share[i] = dbias[h][i];
    }
  }
}

dim3 grid_of(DType dtype, int64_t tiles, int64_t columns) {
  return dim3(static_cast<unsigned>(tiles), ceil_div(columns, kThreads * (dtype == DType::kFloat ? 4 : 8)));
}

struct LaunchFwd {
  const ActivationFwdArgs& args;
  cudaStream_t stream;

  template <typename T>
  cudaError_t run() const {
    return args.gated ? run_with<T, 2>() : run_with<T, 1>();
  }

  template <typename T, int kHalves>
  cudaError_t run_with() const {
    const bool wide = is_wide(args.dtype, args.columns, args.pre, args.inner);
    const auto kernel = wide ? activation_fwd_kernel<T, kHalves, true> : activation_fwd_kernel<T, kHalves, false>;
    const dim3 grid = grid_of(args.dtype, ceil_div(args.rows, 4 / kHalves), args.columns);
    return launch(kernel, grid, dim3(kThreads), 0, args, stream);
  }
};

struct LaunchBwd {
  const ActivationBwdArgs& args;
  cudaStream_t stream;

  template <typename T>
  cudaError_t run() const {
    return args.gated ? run_with<T, 2>() : run_with<T, 1>();
  }

  template <typename T, int kHalves>
  cudaError_t run_with() const {
    const bool wide = is_wide(args.dtype, args.columns, args.dinner, args.pre, args.dpre, args.inner);
    const auto kernel = wide ? activation_bwd_kernel<T, kHalves, true> : activation_bwd_kernel<T, kHalves, false>;
    const dim3 grid = grid_of(args.dtype, activation_bwd_shares(args.rows), args.columns);
    return launch(kernel, grid, dim3(kThreads), 0, Tile{args, rows_per_share(args.rows)}, stream);
  }
};

}  // namespace

cudaError_t launch_activation_fwd(const ActivationFwdArgs& args, cudaStream_t stream) {
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
  const int64_t shares = activation_bwd_shares(args.rows);
  const bool is_apart = args.second_dbias != nullptr;
  const int64_t columns = (args.gated && !is_apart ? 2 : 1) * args.columns;
  return launch_column_sums(
      {args.dtype, args.shares, shares, is_apart ? 2 : 1, columns, {args.dbias, args.second_dbias, nullptr}}, stream);
}

}  // namespace fastbert
