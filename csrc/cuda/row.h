// Rows in registers. The threads along x share a row, a warp or several; the rows of a block lie along y. A thread has
// kPerThread columns, in chunks of 16 bytes that are dealt out in turn, so that neighbours read neighbouring bytes.
#pragma once

#include "../include/philox.h"
#include "chunk.h"
#include "dropout.h"

namespace fastbert {

template <typename T, int kPerThread_, bool kWide>
struct Row {
  static constexpr int kPerThread = kPerThread_;
  static constexpr int kSize = Chunk<T>::kSize;
  static constexpr int kChunks = kPerThread / kSize;

  // A thread's part of a row, as it lies in memory: half the registers of floats where T is 2 bytes.
  struct Part {
    Chunk<T> chunks[kChunks];
    __device__ __forceinline__ float operator[](int i) const { return to_float(chunks[i / kSize].values[i % kSize]); }
  };

  int columns;

  __device__ __forceinline__ int first(int chunk) const {
    return (chunk * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kSize;
  }
  __device__ __forceinline__ int column(int i) const { return first(i / kSize) + i % kSize; }
  // Of a wide row whole chunks are there or not.
  __device__ __forceinline__ bool has(int i) const { return (kWide ? first(i / kSize) : column(i)) < columns; }

  // `row` points to column 0. Zeros beyond the row's end.
  __device__ __forceinline__ Part load(const void* matrix, int64_t row) const {
    Part part;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) part.chunks[c] = load(matrix, row, c);
    return part;
  }

  __device__ __forceinline__ Chunk<T> load(const void* matrix, int64_t row, int c) const {
    return load_chunk<kWide>(static_cast<const T*>(matrix) + row * columns + first(c), columns - first(c));
  }

  __device__ __forceinline__ Part load_or_zeros(const void* matrix, int64_t row) const {
    return matrix == nullptr ? zeros() : load(matrix, row);
  }

  __device__ __forceinline__ Part zeros() const {
    Part part;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) part.chunks[i / kSize].values[i % kSize] = from_float<T>(0.0f);
    return part;
  }

  __device__ __forceinline__ Part round(const float (&values)[kPerThread]) const {
    Part part;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) part.chunks[i / kSize].values[i % kSize] = from_float<T>(values[i]);
    return part;
  }

  __device__ __forceinline__ void store(void* matrix, int64_t row, const Part& part) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) store(matrix, row, c, part.chunks[c]);
  }

  __device__ __forceinline__ void store(void* matrix, int64_t row, int c, const Chunk<T>& chunk) const {
    store_chunk<kWide>(static_cast<T*>(matrix) + row * columns + first(c), columns - first(c), chunk);
  }

  // The four values from the `i`th on, i a multiple of four, become 0 where they are dropped: one Philox call.
  __device__ __forceinline__ void drop_four(const DropoutMask& mask, int64_t row, int i, float* values) const {
    const uint64_t counter = static_cast<uint64_t>(row) * static_cast<uint64_t>((columns + 3) / 4);
    const Philox4 random = philox4x32_10(counter + static_cast<uint64_t>(column(i) / 4),
                                         static_cast<uint64_t>(mask.philox[1]), static_cast<uint64_t>(mask.philox[0]));
    values[0] *= random.w0 < mask.threshold ? 0.0f : mask.scale;
    values[1] *= random.w1 < mask.threshold ? 0.0f : mask.scale;
    values[2] *= random.w2 < mask.threshold ? 0.0f : mask.scale;
    values[3] *= random.w3 < mask.threshold ? 0.0f : mask.scale;
  }
};

// Each sum over the threads of a row, the same bits in all of them. `slots`: kSums floats for every warp of the block,
// which no thread may still be reading.
template <int kSums>
__device__ __forceinline__ void add_over_row(float (&sums)[kSums], float* slots) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums[s] += __shfl_xor_sync(0xffffffffu, sums[s], distance);
  }
  const int warps = static_cast<int>(blockDim.x) / 32;
  if (warps == 1) return;
  slots += static_cast<int>(threadIdx.y) * warps * kSums;
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) slots[static_cast<int>(threadIdx.x) / 32 * kSums + s] = sums[s];
  }
  __syncthreads();
#pragma unroll
  for (int s = 0; s < kSums; ++s) sums[s] = 0.0f;
  for (int warp = 0; warp < warps; ++warp) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums[s] += slots[warp * kSums + s];
  }
}

struct Statistics {
  float mean;
  float rstd;
};

// The row's values, whatever stands beyond its end, become (value - mean) * rstd, with a mean of 0 for RMSNorm.
// `slots`: three floats a warp.
template <typename R>
__device__ __forceinline__ Statistics normalise(const R& columns, float (&values)[R::kPerThread], bool rms, float eps,
                                                float* slots) {
  const float inverse = 1.0f / static_cast<float>(columns.columns);
  const int warps = static_cast<int>(blockDim.x * blockDim.y) / 32;
  float sum[1] = {0.0f}, mean = 0.0f, left = 0.0f;
  if (!rms) {
#pragma unroll
    for (int i = 0; i < R::kPerThread; ++i) sum[0] += columns.has(i) ? values[i] : 0.0f;
    add_over_row(sum, slots);
    mean = sum[0] * inverse;
    // The rounding error of a large mean is of the size of a small spread: what is left after centring is taken off
    // too.
    sum[0] = 0.0f;
#pragma unroll
    for (int i = 0; i < R::kPerThread; ++i) {
      values[i] = columns.has(i) ? values[i] - mean : 0.0f;
      sum[0] += values[i];
    }
    add_over_row(sum, slots + warps);
    left = sum[0] * inverse;
    sum[0] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < R::kPerThread; ++i) {
    values[i] = columns.has(i) ? values[i] - left : 0.0f;
    sum[0] += values[i] * values[i];
  }
  add_over_row(sum, slots + 2 * warps);
  const float rstd = 1.0f / sqrtf(sum[0] * inverse + eps);
#pragma unroll
  for (int i = 0; i < R::kPerThread; ++i) values[i] *= rstd;
  return {mean + left, rstd};
}

// values * weight + bias, where they are given, rounded into row `row` of out.
template <typename R>
__device__ __forceinline__ void scale_and_store(const R& columns, float (&values)[R::kPerThread], const void* weight,
                                                const void* bias, void* out, int64_t row) {
  const auto w = columns.load(weight, 0);
  const auto b = columns.load_or_zeros(bias, 0);
#pragma unroll
  for (int i = 0; i < R::kPerThread; ++i) values[i] = values[i] * w[i] + b[i];
  columns.store(out, row, columns.round(values));
}

// The block for rows whose threads have `per_thread` columns each: four rows of one warp, or one row of several.
inline dim3 row_block(int64_t columns, int per_thread) {
  const unsigned warps = ceil_div(columns, 32 * per_thread);
  return dim3(32 * warps, warps == 1 ? 4 : 1);
}

}  // namespace fastbert
