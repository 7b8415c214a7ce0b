// Which instruction set the CPU kernels run with. cpuid decides, once; tests may ask for a lower one.
// -DFASTBERT_WITHOUT_AMX and the like leave a set out: recipe.py says which, for a checkout those that its processor
// lacks.
#pragma once

#include <array>
#include <atomic>

#include "inline.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Kernel bodies and everything that they call are forced inline (FASTBERT_INLINE) into functions that carry a target
// attribute. One source serves every ISA, and no ordinary inline function is ever emitted with wide instructions, so
// the linker cannot pick one for a caller that runs on an older CPU (which happens with a file compiled under
// -mavx512f).

namespace fastbert {

// The best last. kAvxVnni has dot products of bytes in AVX2's vectors, as desktops without AVX-512 have them.
enum class Isa { kGeneric, kAvx2, kAvxVnni, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx };

// In the order of Isa.
#if defined(__x86_64__)
inline constexpr std::array kIsaNames{"generic", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"};
#else
inline constexpr std::array kIsaNames{"generic"};
#endif

constexpr bool is_built(Isa isa) {
  switch (isa) {
#if defined(FASTBERT_WITHOUT_AVX2)
    case Isa::kAvx2:
      return false;
#endif
#if defined(FASTBERT_WITHOUT_AVX_VNNI)
    case Isa::kAvxVnni:
      return false;
#endif
#if defined(FASTBERT_WITHOUT_AVX512)
    case Isa::kAvx512:
      return false;
#endif
#if defined(FASTBERT_WITHOUT_AVX512_VNNI)
    case Isa::kAvx512Vnni:
      return false;
#endif
#if defined(FASTBERT_WITHOUT_AVX512_BF16)
    case Isa::kAvx512Bf16:
      return false;
#endif
#if defined(FASTBERT_WITHOUT_AMX)
    case Isa::kAmx:
      return false;
#endif
    default:
      return true;
  }
}

#if defined(__x86_64__)
// Whether the CPU multiplies tiles of bfloat16 and of int8, and Linux, which must be asked once, lets this process do
// so.
inline bool has_amx() {
#if defined(FASTBERT_AMX_EMULATION)
  return true;
#elif defined(__linux__)
  constexpr unsigned kAmxBits = 1u << 22 | 1u << 24 | 1u << 25;  // of cpuid 7's edx: bf16, tiles, int8
  constexpr long kRequestPermission = 0x1023, kTileData = 18;    // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kAmxBits) == kAmxBits &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

inline bool has_avx_vnni() {
#if defined(FASTBERT_AVX_VNNI_EMULATION)
  return true;
#else
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & 1u << 4) != 0;
#endif
}
#endif

// Whether this machine can, with kernels for it or without.
inline bool can_run([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  // These tests include the operating system's: registers that it does not save count as missing.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  switch (isa) {
    case Isa::kGeneric:
      return true;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvxVnni:
      return avx2 && has_avx_vnni();
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx512Vnni:
      return vnni;
    case Isa::kAvx512Bf16:
      return bf16;
    case Isa::kAmx:
      return bf16 && has_amx();
  }
#endif
  return isa == Isa::kGeneric;
}

inline Isa best_isa() {
  Isa best = Isa::kAmx;
  while (!is_built(best) || !can_run(best)) best = static_cast<Isa>(static_cast<int>(best) - 1);
  return best;
}

inline std::atomic<Isa>& current_isa() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

}  // namespace fastbert

// FASTBERT_DISPATCH(f, (int a, int b), (a, b)) defines `template <typename T> void f(int a, int b)`, which runs
// `f_body<T>(a, b)` compiled for the ISA in use.
#if defined(__x86_64__)
#define FASTBERT_DISPATCH(name, parameters, arguments)                                                   \
  template <typename T>                                                                                  \
  __attribute__((target("avx2,fma"))) void name##_avx2 parameters {                                      \
    name##_body<T> arguments;                                                                            \
  }                                                                                                      \
  template <typename T>                                                                                  \
  __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq"))) void name##_avx512 parameters { \
    name##_body<T> arguments;                                                                            \
  }                                                                                                      \
  template <typename T>                                                                                  \
  void name parameters {                                                                                 \
    const auto isa = ::fastbert::current_isa().load(std::memory_order_relaxed);                          \
    if constexpr (::fastbert::is_built(::fastbert::Isa::kAvx512)) {                                      \
      if (isa >= ::fastbert::Isa::kAvx512) return name##_avx512<T> arguments;                            \
    }                                                                                                    \
    if constexpr (::fastbert::is_built(::fastbert::Isa::kAvx2)) {                                        \
      if (isa >= ::fastbert::Isa::kAvx2) return name##_avx2<T> arguments;                                \
    }                                                                                                    \
    name##_body<T> arguments;                                                                            \
  }
#else
#define FASTBERT_DISPATCH(name, parameters, arguments) \
  template <typename T>                                \
  void name parameters {                               \
    name##_body<T> arguments;                          \
  }
#endif
