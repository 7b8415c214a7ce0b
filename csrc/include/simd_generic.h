// Vectors of four, in the compiler's own vector types: SSE2 on any x86-64, NEON on ARM. Included by foreach_isa.h.

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef uint64_t Longs __attribute__((vector_size(16)));
constexpr int64_t kWidth = 4;
constexpr int64_t kTileVectors = 2;  // of a tile's width: 6 x 2 sums, 2 operands and a broadcast fit 16 registers
constexpr bool kHasBf16 = false;
constexpr bool kSplitsBytes = false;

FASTBERT_SIMD Floats set1(float x) { return Floats{x, x, x, x}; }
FASTBERT_SIMD Ints set1(int32_t x) { return Ints{x, x, x, x}; }
FASTBERT_SIMD Floats load(const float* p) {
  Floats x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
FASTBERT_SIMD Ints load(const int32_t* p) {
  Ints x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
FASTBERT_SIMD Floats load(const BFloat16* p) {
  return Floats{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
FASTBERT_SIMD void store(float* p, Floats x) { __builtin_memcpy(p, &x, sizeof(x)); }
FASTBERT_SIMD void store(int32_t* p, Ints x) { __builtin_memcpy(p, &x, sizeof(x)); }
FASTBERT_SIMD void stream(int32_t* p, Ints x) { store(p, x); }
FASTBERT_SIMD void stream(float* p, Floats x) { store(p, x); }
FASTBERT_SIMD void end_of_streams() {}
FASTBERT_SIMD void store(BFloat16* p, Floats x) {
  for (int i = 0; i < 4; ++i) p[i] = from_float<BFloat16>(x[i]);
}
FASTBERT_SIMD Floats rounded_to_bf16(Floats x) {
  for (int i = 0; i < 4; ++i) x[i] = to_float(from_float<BFloat16>(x[i]));
  return x;
}
// Two bfloat16 a lane, `low` in the low half.
FASTBERT_SIMD Ints pair_bf16(Floats low, Floats high) {
  Ints pair;
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = from_float<BFloat16>(low[i]).bits | uint32_t{from_float<BFloat16>(high[i]).bits} << 16;
    pair[i] = static_cast<int32_t>(bits);
  }
  return pair;
}
FASTBERT_SIMD Floats add(Floats a, Floats b) { return a + b; }
FASTBERT_SIMD Floats sub(Floats a, Floats b) { return a - b; }
FASTBERT_SIMD Floats mul(Floats a, Floats b) { return a * b; }
FASTBERT_SIMD Floats div(Floats a, Floats b) { return a / b; }
FASTBERT_SIMD Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
// Integers wrap, as the instructions' do: a sum may leave int32 and come back.
FASTBERT_SIMD Ints add(Ints a, Ints b) { return (Ints)((Words)a + (Words)b); }
FASTBERT_SIMD Ints sub(Ints a, Ints b) { return (Ints)((Words)a - (Words)b); }
FASTBERT_SIMD Ints mul(Ints a, Ints b) { return a * b; }
FASTBERT_SIMD Floats select(Ints mask, Floats a, Floats b) { return (Floats)(((Ints)a & mask) | ((Ints)b & ~mask)); }
// Like the x86 instructions: b where either is NaN.
FASTBERT_SIMD Floats max(Floats a, Floats b) { return select(a > b, a, b); }
FASTBERT_SIMD Floats min(Floats a, Floats b) { return select(a < b, a, b); }
FASTBERT_SIMD Floats abs(Floats a) { return (Floats)((Ints)a & set1(0x7fffffff)); }
// 1 where x <= 0, else 0.
FASTBERT_SIMD Floats step_up_to_zero(Floats x) { return select(x <= set1(0.0f), set1(1.0f), set1(0.0f)); }
FASTBERT_SIMD Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
// To nearest, ties to even; |x| < 2^22, which is where the added constant pushes the fraction out.
FASTBERT_SIMD Floats round(Floats x) {
  volatile float pushed[4];  // volatile: the compiler must not cancel the two additions
  Floats out;
  for (int i = 0; i < 4; ++i) {
    pushed[i] = x[i] + 12582912.0f;
    out[i] = pushed[i] - 12582912.0f;
  }
  return out;
}
FASTBERT_SIMD Ints to_ints(Floats x) { return __builtin_convertvector(round(x), Ints); }
// x within what can be split into a whole n for scale_by_power and a rest.
FASTBERT_SIMD Floats power_that_scales(Floats x) { return max(set1(-127.0f), x); }
// x * 2^n, n whole, at most 128 and of power_that_scales' result; 2^-127 and less counts as 0, 2^128 as infinite.
FASTBERT_SIMD Floats scale_by_power(Floats x, Floats n) {
  return x * (Floats)((__builtin_convertvector(n, Ints) + set1(127)) << 23);
}
FASTBERT_SIMD float sum(Floats x) { return (x[0] + x[2]) + (x[1] + x[3]); }
FASTBERT_SIMD Ints max(Ints a, Ints b) {
  const Ints above = a > b;
  return (a & above) | (b & ~above);
}
FASTBERT_SIMD int32_t largest(Ints x) {
  const int32_t low = x[0] > x[1] ? x[0] : x[1], high = x[2] > x[3] ? x[2] : x[3];
  return low > high ? low : high;
}
FASTBERT_SIMD void store_bytes(uint8_t* p, Ints x) {
  for (int i = 0; i < 4; ++i) p[i] = static_cast<uint8_t>(x[i]);
}
// c + a * b with four unsigned bytes of `a` and four signed ones of each lane of b.
FASTBERT_SIMD Ints dot_bytes(Ints c_, const void* a, Ints b) {
  auto c = (Words)c_;
  uint8_t x[4];
  int8_t y[16];
  __builtin_memcpy(x, a, 4);
  __builtin_memcpy(y, &b, 16);
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) c[i] += static_cast<uint32_t>(x[j] * y[4 * i + j]);
  }
  return (Ints)c;
}
// a0 b0 a1 b1, and a2 b2 a3 b3: the low and the high halves, lane by lane.
FASTBERT_SIMD Ints interleave_low(Ints a, Ints b) { return Ints{a[0], b[0], a[1], b[1]}; }
FASTBERT_SIMD Ints interleave_high(Ints a, Ints b) { return Ints{a[2], b[2], a[3], b[3]}; }
// Products of the lower halves of each pair of lanes.
FASTBERT_SIMD Longs multiply_lower(Longs a, Longs b) {
#if defined(__x86_64__)
  return (Longs)_mm_mul_epu32((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
  return (Longs)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
  return Longs{static_cast<uint64_t>(static_cast<uint32_t>(a[0])) * static_cast<uint32_t>(b[0]),
               static_cast<uint64_t>(static_cast<uint32_t>(a[1])) * static_cast<uint32_t>(b[1])};
#endif
}
// a0 b0 a2 b2 ..., and a1 b1 a3 b3 ....
FASTBERT_SIMD Ints even_longs(Longs a, Longs b) { return (Ints)Longs{a[0], b[0]}; }
FASTBERT_SIMD Ints odd_longs(Longs a, Longs b) { return (Ints)Longs{a[1], b[1]}; }
// x where an unsigned word reaches the threshold, else 0.
FASTBERT_SIMD Floats where_at_least(Ints words, uint32_t threshold, float x) {
  return (Floats)((Ints)((Words)words >= (Words{} + threshold)) & (Ints)set1(x));
}
// block[i][j] becomes block[j][i].
FASTBERT_SIMD void transpose(Ints (&block)[4]) {
  const Ints a = interleave_low(block[0], block[2]), b = interleave_high(block[0], block[2]);
  const Ints c = interleave_low(block[1], block[3]), d = interleave_high(block[1], block[3]);
  block[0] = interleave_low(a, c);
  block[1] = interleave_high(a, c);
  block[2] = interleave_low(b, d);
  block[3] = interleave_high(b, d);
}
