// 16 bytes of a row: what one load or store of a thread moves.
#pragma once

#include <cstring>
#include <type_traits>

#include "runtime.h"

#if !defined(FASTBERT_CUDA_EMULATION)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace fastbert {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }

template <typename T>
__device__ __forceinline__ T from_float(float value) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return __float2half_rn(value);
  }
}

template <typename T>
struct alignas(16) Chunk {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

// The first `count` elements; zeros where there are fewer than kSize. A wide chunk is aligned, and all there or not.
template <bool kWide, typename T, typename Count>
__device__ __forceinline__ Chunk<T> load_chunk(const T* from, Count count) {
  Chunk<T> chunk;
  if constexpr (kWide) {
    const uint4 bits = count > 0 ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
    memcpy(&chunk, &bits, sizeof(bits));
  } else {
#pragma unroll
    for (int i = 0; i < Chunk<T>::kSize; ++i) chunk.values[i] = i < count ? from[i] : from_float<T>(0.0f);
  }
  return chunk;
}

template <bool kWide, typename T, typename Count>
__device__ __forceinline__ void store_chunk(T* to, Count count, const Chunk<T>& chunk) {
  if constexpr (kWide) {
    uint4 bits;
    memcpy(&bits, &chunk, sizeof(bits));
    if (count > 0) *reinterpret_cast<uint4*>(to) = bits;
  } else {
#pragma unroll
    for (int i = 0; i < Chunk<T>::kSize; ++i) {
      if (i < count) to[i] = chunk.values[i];
    }
  }
}

// Whether rows of `columns` elements that begin at these addresses are made of wide chunks; null is an absent operand.
template <typename... Pointers>
bool is_wide(DType dtype, int64_t columns, Pointers... pointers) {
  const uintptr_t bits = (reinterpret_cast<uintptr_t>(pointers) | ...);
  return columns % (dtype == DType::kFloat ? 4 : 8) == 0 && bits % 16 == 0;
}

// f.template run<T>() with the storage type that stands for dtype.
template <typename F>
auto for_dtype(DType dtype, const F& f) {
  if (dtype == DType::kFloat) return f.template run<float>();
  if (dtype == DType::kBFloat16) return f.template run<__nv_bfloat16>();
  return f.template run<__half>();
}

}  // namespace fastbert
