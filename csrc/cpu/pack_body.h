// Packing a GEMM's right side for one ISA; included by gemm_body.h.

template <typename To, typename From>
FASTBERT_SIMD To convert(From x) {
  return from_float<To>(to_float(x));
}
template <>
FASTBERT_SIMD int8_t convert<int8_t, int8_t>(int8_t x) {
  return x;
}

// The four bytes of one step and column: kPerStep elements from `x` on, `stride` apart, zeros from the `count`th on.
template <typename To, typename From>
FASTBERT_SIMD uint32_t step_of(const From* x, int64_t stride, int64_t count) {
  constexpr int64_t kPerStep = 4 / sizeof(To);
  To elements[kPerStep] = {};
  for (int64_t i = 0; i < kPerStep; ++i) {
    if (i < count) elements[i] = convert<To>(x[i * stride]);
  }
  uint32_t bits;
  __builtin_memcpy(&bits, elements, 4);
  return bits;
}

// A row's next 16 steps, and 64 columns' one step, in vectors: packing a weight is to cost little beside the products
// of a training step, which packs every weight twice.
template <typename From>
FASTBERT_SIMD void sixteen_steps(const From* row, float* out) {
  for (int64_t i = 0; i < 16; i += kWidth) store(out + i, load(row + i));
}
template <typename From>
FASTBERT_SIMD void sixteen_steps(const From* row, BFloat16* out) {
  for (int64_t i = 0; i < 32; i += kWidth) store(out + i, load(row + i));
}
FASTBERT_SIMD void sixteen_steps(const int8_t* row, int8_t* out) { std::memcpy(out, row, 64); }

// `kStreams`: past the caches, for what is read much later, as a weight that an optimizer has written.
template <bool kStreams>
FASTBERT_SIMD void put(uint32_t* p, Ints x) {
  kStreams ? stream(reinterpret_cast<int32_t*>(p), x) : store(reinterpret_cast<int32_t*>(p), x);
}

template <typename To, bool kStreams, typename From>
FASTBERT_SIMD void one_step(const From* rows, [[maybe_unused]] int64_t stride, uint32_t* out) {
  for (int64_t c = 0; c < kPanel; c += kWidth) {
    if constexpr (sizeof(To) == 2) {
      put<kStreams>(out + c, pair_bf16(load(rows + c), load(rows + stride + c)));
    } else {
      store(reinterpret_cast<float*>(out) + c, load(rows + c));
    }
  }
}

// kWidth rows of kWidth steps, `stride` bytes apart, into as many rows of a panel.
template <bool kStreams>
FASTBERT_SIMD void transpose_square(const void* rows, int64_t stride, uint32_t* out) {
  Ints square[kWidth];
  const auto* row = static_cast<const char*>(rows);
  for (int64_t i = 0; i < kWidth; ++i) square[i] = load(reinterpret_cast<const int32_t*>(row + i * stride));
  transpose(square);
  for (int64_t i = 0; i < kWidth; ++i) put<kStreams>(out + i * kPanel, square[i]);
}

// Up to 16 steps of a panel's `columns` from `c` on, kWidth at most, from a weight whose rows lie whole: a row is
// summed over.
template <typename To, bool kStreams, typename From>
FASTBERT_SIMD void pack_rows_whole(const From* weight, int64_t stride, int64_t columns, int64_t in_features,
                                   int64_t steps, uint32_t* out) {
  constexpr int64_t kPerStep = 4 / sizeof(To), kSteps = 16;
  const bool whole = in_features >= steps * kPerStep && steps == kSteps;
  // The rows that come next, which are far behind what the hardware fetches of so many.
  for (int64_t c = 0; whole && c < kWidth; ++c) {
    const auto* next = reinterpret_cast<const char*>(weight + (c + kWidth) * stride);
    for (int64_t at = 0; at < int64_t{sizeof(From)} * kPerStep * kSteps; at += 64) __builtin_prefetch(next + at, 0, 2);
  }
  if (std::is_same_v<To, From> && whole && columns == kWidth) {
    const int64_t bytes = stride * int64_t{sizeof(From)};
    for (int64_t s = 0; s < kSteps; s += kWidth) {
      transpose_square<kStreams>(weight + s * kPerStep, bytes, out + s * kPanel);
    }
    return;
  }
  uint32_t block[kWidth][kSteps];
  for (int64_t c = 0; c < columns; ++c) {
    const From* row = weight + c * stride;
    if (whole) {
      sixteen_steps(row, reinterpret_cast<To*>(block[c]));
    } else {
      for (int64_t s = 0; s < steps; ++s) block[c][s] = step_of<To>(row + s * kPerStep, 1, in_features - s * kPerStep);
    }
  }
  if (columns == kWidth && steps == kSteps) {
    for (int64_t s = 0; s < kSteps; s += kWidth) transpose_square<kStreams>(&block[0][s], kSteps * 4, out + s * kPanel);
    return;
  }
  for (int64_t s = 0; s < steps; ++s) {
    for (int64_t c = 0; c < columns; ++c) out[s * kPanel + c] = block[c][s];
  }
}

// One step of a panel, from a weight whose columns lie whole.
template <typename To, bool kStreams, typename From>
FASTBERT_SIMD void pack_columns_whole(const From* weight, int64_t stride, int64_t columns, int64_t in_features,
                                      uint32_t* out) {
  if constexpr (sizeof(To) > 1) {
    constexpr int64_t kPerStep = 4 / sizeof(To);
    if (in_features >= kPerStep && columns == kPanel) return one_step<To, kStreams>(weight, stride, out);
  }
  for (int64_t c = 0; c < columns; ++c) out[c] = step_of<To>(weight + c, stride, in_features);
}

// Memory is read in the order in which it lies, as far as that goes, so that the hardware fetches ahead: kWidth rows
// from end to end, or the rows of all panels.
template <typename To, typename From, bool kStreams = false>
void pack_typed(const PackArgs& args, int64_t begin, int64_t end) {
  constexpr int64_t kPerStep = 4 / sizeof(To), kSteps = 16;
  const auto* weight = static_cast<const From*>(args.weight);
  const int64_t k = args.in_features, steps = (k + kPerStep - 1) / kPerStep;
  const auto panel = [&](int64_t p) {
    return reinterpret_cast<uint32_t*>(args.packed + p * panel_bytes(args.format, k));
  };
  const auto columns_of = [&](int64_t p) { return std::min(kPanel, args.out_features - p * kPanel); };
  for (int64_t p = begin; p < end; ++p) {
    if (columns_of(p) < kPanel && steps > 0) std::memset(panel(p), 0, static_cast<size_t>(steps) * kPanel * 4);
  }
  if (args.in_stride == 1) {
    for (int64_t p = begin; p < end; ++p) {
      for (int64_t c = 0; c < columns_of(p); c += kWidth) {
        const From* rows = weight + (p * kPanel + c) * args.out_stride;
        const int64_t columns = std::min(kWidth, columns_of(p) - c);
        for (int64_t step = 0; step < steps; step += kSteps) {
          pack_rows_whole<To, kStreams>(rows + step * kPerStep, args.out_stride, columns, k - step * kPerStep,
                                        std::min(kSteps, steps - step), panel(p) + step * kPanel + c);
        }
      }
    }
  } else {
    for (int64_t step = 0; step < steps; ++step) {
      const From* rows = weight + step * kPerStep * args.in_stride;
      if (end == begin + 1) {  // a few lines of each row, which the hardware takes for no pattern
        constexpr int64_t kAhead = 16;
        const auto* next = reinterpret_cast<const char*>(rows + begin * kPanel + kAhead * kPerStep * args.in_stride);
        for (int64_t i = 0; i < kPerStep; ++i) {
          for (int64_t at = 0; at < kPanel * int64_t{sizeof(From)}; at += 64) {
            __builtin_prefetch(next + i * args.in_stride * int64_t{sizeof(From)} + at, 0, 2);
          }
        }
      }
      for (int64_t p = begin; p < end; ++p) {
        pack_columns_whole<To, kStreams>(rows + p * kPanel, args.in_stride, columns_of(p), k - step * kPerStep,
                                         panel(p) + step * kPanel);
      }
    }
  }
  if (sizeof(To) > 1 || args.channel_offset == nullptr) return;
  for (int64_t p = begin; p < end; ++p) {
    const auto* elements = reinterpret_cast<const int8_t*>(panel(p));
    for (int64_t c = 0; c < kPanel; ++c) {
      int32_t sum = 0;
      for (int64_t i = 0; i < steps * 4; ++i) sum += elements[(i / 4 * kPanel + c) * 4 + i % 4];
      args.channel_offset[p * kPanel + c] = static_cast<int32_t>(128 * static_cast<uint32_t>(sum));  // it may wrap
    }
  }
}

void pack_panels(const PackArgs& args, int64_t begin, int64_t end) {
  if (args.format == DType::kInt8) return pack_typed<int8_t, int8_t>(args, begin, end);
  const bool from_float32 = args.dtype == DType::kFloat32;
  if (args.format == DType::kBFloat16 && args.streams) {
    pack_typed<BFloat16, float, true>(args, begin, end);
    return end_of_streams();
  }
  if (args.format == DType::kBFloat16) {
    return from_float32 ? pack_typed<BFloat16, float>(args, begin, end)
                        : pack_typed<BFloat16, BFloat16>(args, begin, end);
  }
  from_float32 ? pack_typed<float, float>(args, begin, end) : pack_typed<float, BFloat16>(args, begin, end);
}
