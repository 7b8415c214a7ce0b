#include "embedding.h"

#include "row.h"

namespace fastbert {
namespace {

template <typename R>
__global__ void __launch_bounds__(256, 1) embed_fwd_kernel(EmbedFwdArgs a) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= a.rows) return;  // a whole warp, in a block of one-warp rows: nobody waits for it
  const R columns{a.width};
  const auto word = columns.load(a.word, a.input_ids == nullptr ? row : a.input_ids[row]);
  const auto position = columns.load(a.position, a.position_ids[row]);
  const auto type = columns.load_or_zeros(a.token_type, a.token_type_ids == nullptr ? 0 : a.token_type_ids[row]);

  float values[R::kPerThread];
#pragma unroll
  for (int i = 0; i < R::kPerThread; ++i) values[i] = word[i] + type[i] + position[i];
  const auto summed = columns.round(values);
  if (a.weight == nullptr) return columns.store(a.out, row, summed);
#pragma unroll
  for (int i = 0; i < R::kPerThread; ++i) values[i] = summed[i];
  normalise(columns, values, a.eps, shared);
  scale_and_store(columns, values, a.weight, a.bias, a.out, row);
}

struct Launch {
  const EmbedFwdArgs& args;
  cudaStream_t stream;

  template <typename T>
  cudaError_t run() const {
    if (!is_wide(args.dtype, args.width, args.word, args.position, args.token_type, args.weight, args.bias, args.out)) {
      return as<Row<T, 32, false>>();
    }
    if (args.width <= 256) return as<Row<T, 8, true>>();
    if (args.width <= 512) return as<Row<T, 16, true>>();
    if (args.width <= 768) return as<Row<T, 24, true>>();
    return as<Row<T, 32, true>>();
  }

  template <typename R>
  cudaError_t as() const {
    const dim3 block = row_block(args.width, R::kPerThread);
    const size_t slots = 3 * block.x * block.y / 32;
    return launch(embed_fwd_kernel<R>, dim3(ceil_div(args.rows, block.y)), block, slots, args, stream);
  }
};

}  // namespace

cudaError_t launch_embed_fwd(const EmbedFwdArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.width == 0) return cudaSuccess;
  return for_dtype(args.dtype, Launch{args, stream});
}

}  // namespace fastbert
