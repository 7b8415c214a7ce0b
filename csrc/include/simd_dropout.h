// dropout.h's masks, drawn in vectors: the same words of the same counters. Included by foreach_isa.h.
//
// A counter's four words stand in the lower halves of 64-bit lanes, where a product is one instruction and its upper
// half one shift away; what is left in the upper halves no product reads. Left to the compiler, the loop over counters
// splits every product in two and sorts the halves anew, which takes three times as long, and the few counters of a
// short row are taken one by one.

// What all counters of a mask share.
struct DropoutMask {
  uint64_t offset;
  uint32_t threshold;
  float keep;
  uint32_t keys[10][2];  // of each round

  static DropoutMask of(const Dropout& dropout) {
    DropoutMask mask{dropout.offset, dropout_threshold(dropout.p), dropout_scale(dropout.p), {}};
    auto k0 = static_cast<uint32_t>(dropout.seed), k1 = static_cast<uint32_t>(dropout.seed >> 32);
    for (auto& key : mask.keys) {
      key[0] = k0, key[1] = k1;
      k0 += kPhiloxKeyStep0, k1 += kPhiloxKeyStep1;
    }
    return mask;
  }
};

// The words of one counter in each lane, in the lower halves.
struct PhiloxWords {
  Longs w0, w1, w2, w3;
};

FASTBERT_SIMD PhiloxWords philox(const DropoutMask& mask, Longs counters) {
  const Longs factor0 = Longs{} + kPhiloxFactor0, factor1 = Longs{} + kPhiloxFactor1;
  PhiloxWords w{counters, counters >> 32, Longs{} + mask.offset, Longs{} + (mask.offset >> 32)};
#pragma GCC unroll 10
  for (const auto& key : mask.keys) {
    const Longs a = multiply_lower(w.w0, factor0), b = multiply_lower(w.w2, factor1);
    const Longs k0 = (Longs)set1(static_cast<int32_t>(key[0])), k1 = (Longs)set1(static_cast<int32_t>(key[1]));
    w = {(b >> 32) ^ w.w1 ^ k0, b, (a >> 32) ^ w.w3 ^ k1, a};
  }
  return w;
}

// Lower halves side by side.
FASTBERT_SIMD Longs join(Longs even, Longs odd) { return (even & (Longs{} + 0xffffffffu)) | (odd << 32); }

// Of each vector, 64 bits wide lanes: 0, 1, 2, ... times `factor`.
FASTBERT_SIMD Longs multiples(uint64_t factor) {
  Longs x = Longs{};
  for (size_t lane = 1; lane < sizeof(Longs) / 8; ++lane) x[lane] = x[lane - 1] + factor;
  return x;
}

// The multipliers of kWidth columns from those of counter `first` on, and of as many from `first + apart` on.
struct TwoMultipliers {
  Floats first, second;
};

FASTBERT_SIMD TwoMultipliers draw_multipliers(const DropoutMask& mask, uint64_t first, uint64_t apart) {
  // Even lanes are of the first columns, odd ones of the second: as even_longs and odd_longs want them.
  alignas(64) static constexpr uint64_t kCounters[8] = {0, 0, 1, 1, 2, 2, 3, 3};
  alignas(64) static constexpr uint64_t kOdd[8] = {0, ~uint64_t{0}, 0, ~uint64_t{0}, 0, ~uint64_t{0}, 0, ~uint64_t{0}};
  Longs counters, odd;
  __builtin_memcpy(&counters, kCounters, sizeof(Longs));
  __builtin_memcpy(&odd, kOdd, sizeof(Longs));
  const PhiloxWords w = philox(mask, counters + (Longs{} + first) + (odd & (Longs{} + apart)));
  const Longs w01 = join(w.w0, w.w1), w23 = join(w.w2, w.w3);
  return {where_at_least(even_longs(w01, w23), mask.threshold, mask.keep),
          where_at_least(odd_longs(w01, w23), mask.threshold, mask.keep)};
}

// The multipliers of one counter's four columns in kWidth rows, a row in each lane: row r's counter is
// first + r * per_row, and `every_other_row` is multiples(2 * per_row).
struct ColumnMultipliers {
  Floats column[4];
};

FASTBERT_SIMD ColumnMultipliers draw_columns(const DropoutMask& mask, uint64_t first, uint64_t per_row,
                                             Longs every_other_row) {
  const PhiloxWords even = philox(mask, every_other_row + (Longs{} + first));
  const PhiloxWords odd = philox(mask, every_other_row + (Longs{} + (first + per_row)));
  const auto multipliers = [&](Longs a, Longs b) FASTBERT_INLINE_LAMBDA {
    return where_at_least((Ints)join(a, b), mask.threshold, mask.keep);
  };
  return {{multipliers(even.w0, odd.w0), multipliers(even.w1, odd.w1), multipliers(even.w2, odd.w2),
           multipliers(even.w3, odd.w3)}};
}

// The multipliers of a row from the columns of counter `first` on. Whole pairs of vectors are written: `out` has room
// for `n` columns rounded up to 2 * kWidth. Not inlined, as the next one: the loops beside it need their registers.
__attribute__((noinline)) inline void draw_row(const DropoutMask& mask, uint64_t first, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 2 * kWidth) {
    const TwoMultipliers two = draw_multipliers(mask, first + static_cast<uint64_t>(i / 4), kWidth / 4);
    store(out + i, two.first);
    store(out + i + kWidth, two.second);
  }
}

// Those of row `row` among rows that come in turn, whose counters are `per_row` apart: rows of one vector are drawn two
// at a time. An even row begins at `out`, an odd one `stride` further.
__attribute__((noinline)) inline const float* draw_in_turn(const DropoutMask& mask, uint64_t first, uint64_t per_row,
                                                           int64_t row, int64_t n, int64_t stride, float* out) {
  float* to = out + row % 2 * stride;
  if (n > kWidth) {
    draw_row(mask, first, n, to);
  } else if (row % 2 == 0) {
    const TwoMultipliers two = draw_multipliers(mask, first, per_row);
    store(to, two.first);
    store(to + stride, two.second);
  }
  return to;
}
