// How functions are marked that several instruction sets, or the CPU and the GPU, compile for themselves.
#pragma once

#if defined(__CUDACC__)
#define FASTBERT_INLINE __host__ __device__ __forceinline__
#else
#define FASTBERT_INLINE [[gnu::always_inline]] inline
#endif
#define FASTBERT_INLINE_LAMBDA __attribute__((always_inline))
