#include "embedding.h"

#include <cmath>

#include "row.h"

namespace fastbert {
namespace {

__device__ __forceinline__ bool is_row(int64_t id, int64_t rows) {
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(rows);
}

template <typename R>
__global__ void __launch_bounds__(256, 1) embed_fwd_kernel(EmbedFwdArgs a) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= a.rows) return;  // a whole warp, in a block of one-warp rows: nothing waits for it
  const R columns{a.width};
  const int64_t word_id = a.input_ids == nullptr ? row : a.input_ids[row];
  const int64_t position_id = a.position_ids == nullptr ? 0 : a.position_ids[row];
  const int64_t type_id = a.token_type_ids == nullptr ? 0 : a.token_type_ids[row];
  // The threads of a row agree. No early return: those of other rows wait for these at barriers.
  const bool known =
      is_row(word_id, a.word_rows) && is_row(position_id, a.position_rows) && is_row(type_id, a.token_type_rows);
  const auto word = columns.load(a.word, known ? word_id : 0);
  const auto position = columns.load_or_zeros(a.position, known ? position_id : 0);
  const auto type = columns.load_or_zeros(a.token_type, known ? type_id : 0);

  float values[R::kPerThread];
#pragma unroll
  for (int i = 0; i < R::kPerThread; ++i) values[i] = known ? word[i] + type[i] + position[i] : NAN;
  const auto summed = columns.round(values);
  if (a.weight == nullptr) return columns.store(a.out, row, summed);
#pragma unroll
  for (int i = 0; i < R::kPerThread; ++i) values[i] = summed[i];
  normalise(columns, values, false, a.eps, shared);
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
