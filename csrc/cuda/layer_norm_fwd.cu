#include "layer_norm.h"
#include "row.h"

namespace fastbert {
namespace {

template <typename R>
__global__ void __launch_bounds__(256, 1) add_layer_norm_fwd_kernel(AddLayerNormFwdArgs a) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= a.rows) return;  // a whole warp, in a block of one-warp rows: nothing waits for it
  const R columns{a.hidden_size};
  // All loads of the two matrices before the first use of any.
  const auto x = columns.load(a.x, row);
  const auto residual = columns.load_or_zeros(a.residual, row);
  const auto x_bias = columns.load_or_zeros(a.x_bias, 0);

  float values[R::kPerThread];
#pragma unroll
  for (int i = 0; i < R::kPerThread; ++i) values[i] = x[i] + x_bias[i];
  if (a.dropout.philox != nullptr) {
#pragma unroll
    for (int i = 0; i < R::kPerThread; i += 4) columns.drop_four(a.dropout, row, i, values + i);
  }
#pragma unroll
  for (int i = 0; i < R::kPerThread; ++i) values[i] += residual[i];
  // Rounded as backward will read it: with the statistics of the unrounded sum, the difference times rstd, which is
  // 1e6 for a constant row under eps 1e-12, would swamp the gradient.
  const auto summed = columns.round(values);
  if (a.summed != nullptr) columns.store(a.summed, row, summed);
#pragma unroll
  for (int i = 0; i < R::kPerThread; ++i) values[i] = summed[i];

  const Statistics statistics = normalise(columns, values, a.rms, a.eps, shared);
  if (threadIdx.x == 0) {
    if (a.mean != nullptr) a.mean[row] = statistics.mean;
    if (a.rstd != nullptr) a.rstd[row] = statistics.rstd;
  }
  scale_and_store(columns, values, a.weight, a.bias, a.out, row);
}

struct Launch {
  const AddLayerNormFwdArgs& args;
  cudaStream_t stream;

  template <typename T>
  cudaError_t run() const {
    if (!is_wide(args.dtype, args.hidden_size, args.x, args.x_bias, args.residual, args.weight, args.bias, args.out,
                 args.summed)) {
      return as<Row<T, 32, false>>();
    }
    if (args.hidden_size <= 256) return as<Row<T, 8, true>>();
    if (args.hidden_size <= 512) return as<Row<T, 16, true>>();
    if (args.hidden_size <= 768) return as<Row<T, 24, true>>();
    return as<Row<T, 32, true>>();
  }

  template <typename R>
  cudaError_t as() const {
    const dim3 block = row_block(args.hidden_size, R::kPerThread);
    const size_t slots = 3 * block.x * block.y / 32;
    return launch(add_layer_norm_fwd_kernel<R>, dim3(ceil_div(args.rows, block.y)), block, slots, args, stream);
  }
};

}  // namespace

cudaError_t launch_add_layer_norm_fwd(const AddLayerNormFwdArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.hidden_size == 0) return cudaSuccess;
  return for_dtype(args.dtype, Launch{args, stream});
}

}  // namespace fastbert
