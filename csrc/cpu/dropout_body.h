// Dropout for one ISA; included by dropout.cpp through foreach_isa.h.

void draw_multipliers(const Dropout& dropout, int64_t row, int64_t width, float* multipliers) {
  static_assert(2 * kWidth <= 32);  // what room_for_multipliers counts on
  const auto counters = static_cast<uint64_t>((width + 3) / 4);
  draw_row(DropoutMask::of(dropout), static_cast<uint64_t>(row) * counters, width, multipliers);
}

template <typename T>
void dropout_rows_of(const DropoutArgs<T>& args, int64_t begin, int64_t end) {
  constexpr int64_t kChunk = 256;  // columns, a multiple of Philox's four
  alignas(64) float multipliers[kChunk];
  const DropoutMask mask = DropoutMask::of(args.dropout);
  const auto counters = static_cast<uint64_t>((args.width + 3) / 4);
  const Floats zero = set1(0.0f);
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t first = 0; first < args.width; first += kChunk) {
      const int64_t n = std::min(kChunk, args.width - first);
      draw_row(mask, static_cast<uint64_t>(r) * counters + static_cast<uint64_t>(first / 4), n, multipliers);
      const T* x = args.x + r * args.width + first;
      T* out = args.out + r * args.width + first;
      for (int64_t i = 0; i < n; i += kWidth) {
        const Floats multiplier = load(multipliers + i);
        const Floats kept = mul(load_columns(x + i, n - i), multiplier);
        store_columns(out + i, (Floats)((Ints)kept & (Ints)(multiplier != zero)), n - i);
      }
    }
  }
}

void dropout_rows(const DropoutArgs<float>& args, int64_t begin, int64_t end) { dropout_rows_of(args, begin, end); }
void dropout_rows(const DropoutArgs<BFloat16>& args, int64_t begin, int64_t end) { dropout_rows_of(args, begin, end); }
