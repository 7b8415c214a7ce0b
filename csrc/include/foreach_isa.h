// Includes the file that FASTBERT_BODY names once per instruction set, each time in a namespace of that set's name and
// compiled for it. A kernel body is written once, against the vectors of simd_*.h; `FASTBERT_RUN` calls the copy for
// the ISA in use. What would come out the same is not compiled again: each copy of attention takes the compiler ten
// seconds, and beyond AVX-512 only bfloat16 and 8-bit integers have instructions of their own. So float there is
// AVX-512's (FASTBERT_BF16 in the bodies). A set that is left out, or has nothing to gain, is another name of the one
// below it.
//
// Everything inside is forced inline or internal to its namespace: no function that another file could share is ever
// emitted with wide instructions (see isa.h). Standard headers must be included before this one.
#include <cstdint>
#include <cstring>

#include "activation.h"
#include "bf16.h"
#include "dropout.h"
#include "isa.h"
#include "philox.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define FASTBERT_SIMD __attribute__((always_inline)) inline

namespace fastbert::generic {
#include "simd_generic.h"
#include "simd_math.h"
#include "simd_columns.h"
#include "simd_dropout.h"
#include FASTBERT_BODY
}  // namespace fastbert::generic

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#define FASTBERT_TARGET(features) \
  _Pragma(FASTBERT_STRING(clang attribute push(__attribute__((target(features))), apply_to = function)))
#define FASTBERT_TARGET_END _Pragma("clang attribute pop")
#else
#define FASTBERT_TARGET(features) _Pragma("GCC push_options") _Pragma(FASTBERT_STRING(GCC target(features)))
#define FASTBERT_TARGET_END _Pragma("GCC pop_options")
#endif
#define FASTBERT_STRING(...) #__VA_ARGS__

#if !defined(FASTBERT_WITHOUT_AVX2)
FASTBERT_TARGET("avx2,fma")
namespace fastbert::avx2 {
#include "simd_avx2.h"
#include "simd_math.h"
#include "simd_columns.h"
#include "simd_dropout.h"
#include FASTBERT_BODY
}  // namespace fastbert::avx2
FASTBERT_TARGET_END
#else
namespace fastbert {
namespace avx2 = generic;
}
#endif

// The same vectors, with dot products of bytes. Only for the bodies that multiply them: FASTBERT_USES_VNNI.
#if defined(FASTBERT_USES_VNNI) && !defined(FASTBERT_WITHOUT_AVX_VNNI)
FASTBERT_TARGET("avx2,fma")
#define FASTBERT_AVX_VNNI
namespace fastbert::avx_vnni {
#include "simd_avx2.h"
#include "simd_math.h"
#include "simd_columns.h"
#include "simd_dropout.h"
#include FASTBERT_BODY
}  // namespace fastbert::avx_vnni
#undef FASTBERT_AVX_VNNI
FASTBERT_TARGET_END
#else
namespace fastbert {
namespace avx_vnni = avx2;
}
#endif

#if !defined(FASTBERT_WITHOUT_AVX512)
FASTBERT_TARGET("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")
namespace fastbert::avx512 {
#include "simd_avx512.h"
#include "simd_math.h"
#include "simd_columns.h"
#include "simd_dropout.h"
#include FASTBERT_BODY
}  // namespace fastbert::avx512
FASTBERT_TARGET_END
#else
namespace fastbert {
namespace avx512 = avx2;
}
#endif

#define FASTBERT_VNNI
#if defined(FASTBERT_USES_VNNI) && !defined(FASTBERT_WITHOUT_AVX512_VNNI)
FASTBERT_TARGET("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
namespace fastbert::avx512_vnni {
#include "simd_avx512.h"
#include "simd_math.h"
#include "simd_columns.h"
#include "simd_dropout.h"
#include FASTBERT_BODY
}  // namespace fastbert::avx512_vnni
FASTBERT_TARGET_END
#else
namespace fastbert {
namespace avx512_vnni = avx512;
}
#endif

#if !defined(FASTBERT_WITHOUT_AVX512_BF16)
FASTBERT_TARGET("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")
#define FASTBERT_BF16
namespace fastbert::avx512_bf16 {
#include "simd_avx512.h"
#include "simd_math.h"
#include "simd_columns.h"
#include "simd_dropout.h"
#include FASTBERT_BODY
}  // namespace fastbert::avx512_bf16
FASTBERT_TARGET_END
#else
namespace fastbert {
namespace avx512_bf16 = avx512_vnni;
}
#endif

// Only for the bodies that have something to gain from it: FASTBERT_USES_AMX.
#if defined(FASTBERT_USES_AMX) && !defined(FASTBERT_WITHOUT_AMX)
FASTBERT_TARGET("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")
#define FASTBERT_AMX
namespace fastbert::amx {
#include "simd_avx512.h"
#include "simd_math.h"
#include "simd_columns.h"
#include "simd_dropout.h"
#include FASTBERT_BODY
}  // namespace fastbert::amx
FASTBERT_TARGET_END
#undef FASTBERT_AMX
#else
namespace fastbert {
namespace amx = avx512_bf16;
}
#endif
#undef FASTBERT_VNNI
#undef FASTBERT_BF16

#define FASTBERT_RUN(function, ...)                                    \
  switch (::fastbert::current_isa().load(std::memory_order_relaxed)) { \
    case ::fastbert::Isa::kAmx:                                        \
      return amx::function(__VA_ARGS__);                               \
    case ::fastbert::Isa::kAvx512Bf16:                                 \
      return avx512_bf16::function(__VA_ARGS__);                       \
    case ::fastbert::Isa::kAvx512Vnni:                                 \
      return avx512_vnni::function(__VA_ARGS__);                       \
    case ::fastbert::Isa::kAvx512:                                     \
      return avx512::function(__VA_ARGS__);                            \
    case ::fastbert::Isa::kAvxVnni:                                    \
      return avx_vnni::function(__VA_ARGS__);                          \
    case ::fastbert::Isa::kAvx2:                                       \
      return avx2::function(__VA_ARGS__);                              \
    default:                                                           \
      return generic::function(__VA_ARGS__);                           \
  }
#else
#define FASTBERT_RUN(function, ...) return generic::function(__VA_ARGS__)
#endif
