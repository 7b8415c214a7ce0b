// What a GEMM does with a tile's sums, for one ISA: scales, bias, activation, a gated pair's product, dropout, and what
// backward keeps and makes. Included by gemm_body.h.

// What goes with each output column, padded to whole panels.
struct Channels {
  const float* bias;
  const float* scale;  // int8
};

// A product on its own, or one of a gated pair: the gate is activated and waits in fp32 for what it is multiplied with.
enum class Pair { kNone, kGate, kUp };

// Rows of one panel's sums, on their way out. Taken by value: what is written through pointers may lie in no copy.
struct Tile {
  int64_t row, rows, column;  // of the result
  const char* sums;           // (rows, kPanel)
  const float* row_scale;     // int8
  float* gate;                // (rows, kPanel)
};

// What a tile's sums still need in forward: scales, bias, activation, and the way out. Whole panels, without a branch
// inside: beside the 200 steps of an int8 tile every instruction here shows.
template <typename T, bool kInt8, bool kKeepsPre, Activation kActivation, Pair kPair>
void finish_whole_tile(const GemmTarget& target, const Channels& channels, const Tile tile) {
  constexpr int64_t kGroup = 4;  // vectors whose bias and scale stay in registers for all rows
  for (int64_t first = tile.column; first < tile.column + kPanel; first += kGroup * kWidth) {
    Floats bias[kGroup], scale[kGroup];
    Ints offset[kGroup];
    for (int64_t v = 0; v < kGroup; ++v) {
      bias[v] = load(channels.bias + first + v * kWidth);
      if constexpr (kInt8) {
        scale[v] = load(channels.scale + first + v * kWidth);
        offset[v] = load(target.weight.channel_offset + first + v * kWidth);
      }
    }
    for (int64_t r = 0; r < tile.rows; ++r) {
      const char* sum = tile.sums + r * kStepBytes + (first - tile.column) * 4;
      float* gate = kPair == Pair::kNone ? nullptr : tile.gate + r * kPanel + (first - tile.column);
      T* out = static_cast<T*>(target.out) + (tile.row + r) * target.out_stride + first;
      [[maybe_unused]] T* pre =
          static_cast<T*>(target.pre) + (kKeepsPre ? (tile.row + r) * target.pre_stride + first : 0);
      for (int64_t v = 0; v < kGroup; ++v) {
        Floats x;
        if constexpr (kInt8) {
          const Ints exact = sub(load(reinterpret_cast<const int32_t*>(sum) + v * kWidth), offset[v]);
          x = fma(mul(to_floats(exact), set1(tile.row_scale[r])), scale[v], bias[v]);
        } else {
          x = add(load(reinterpret_cast<const float*>(sum) + v * kWidth), bias[v]);
        }
        if constexpr (kKeepsPre) store(pre + v * kWidth, x);
        if constexpr (kActivation != Activation::kNone) x = activate<sizeof(T) == 4>(kActivation, x);
        if constexpr (kPair == Pair::kUp) x = mul(x, load(gate + v * kWidth));
        if constexpr (kPair == Pair::kGate) {
          store(gate + v * kWidth, x);
        } else {
          store(out + v * kWidth, x);
        }
      }
    }
  }
}

// In the backward of a feed-forward without gate and dropout: the gradient of what went into the activation, and again
// what came out of it, which share most of what they take.
template <typename T, Activation kActivation>
void finish_slope_tile(const GemmTarget& target, const Channels& channels, const Tile tile) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    const auto* sum = reinterpret_cast<const float*>(tile.sums + r * kStepBytes);
    const int64_t row = tile.row + r, at = row * target.out_stride + tile.column;
    const T* before = static_cast<const T*>(target.slope_of) + at;
    T* out = static_cast<T*>(target.out) + at;
    T* activated = static_cast<T*>(target.activated) + row * target.weight.out_features + tile.column;
    for (int64_t c = 0; c < kPanel; c += kWidth) {
      const Floats x = add(load(sum + c), load(channels.bias + tile.column + c)), gate = load(before + c);
      store(activated + c, activate<sizeof(T) == 4>(kActivation, gate));
      store(out + c, mul(x, activation_slope<sizeof(T) == 4>(kActivation, gate)));
    }
  }
}

// The same for whatever is rarer: a panel's rest, other activations, dropout, what backward keeps and makes.
template <typename T>
void finish_any_tile(const GemmTarget& target, const Channels& channels, const Tile tile, Pair pair) {
  const int64_t columns = std::min(kPanel, target.weight.out_features - tile.column);
  const bool is_int8 = target.weight.format == DType::kInt8;
  const Activation activation = target.activation;
  alignas(64) float multiplier[kAmxRows * kPanel];
  if (target.dropout != nullptr) {
    const DropoutMask mask = DropoutMask::of(*target.dropout);
    for (int64_t r = 0; r < tile.rows; ++r) {
      const int64_t counter = (target.dropout_row + tile.row + r) * ((target.weight.out_features + 3) / 4);
      draw_row(mask, static_cast<uint64_t>(counter + tile.column / 4), kPanel, multiplier + r * kPanel);
    }
  }
  for (int64_t c = 0; c < columns; c += kWidth) {
    const Floats bias = load(channels.bias + tile.column + c);
    const int64_t column = tile.column + c, left = columns - c;
    for (int64_t r = 0; r < tile.rows; ++r) {
      const int64_t row = tile.row + r, at = row * target.out_stride + column;
      Floats x;
      if (is_int8) {
        const Ints exact = sub(load(reinterpret_cast<const int32_t*>(tile.sums + r * kStepBytes) + c),
                               load(target.weight.channel_offset + column));
        x = fma(to_floats(exact), mul(load(channels.scale + column), set1(tile.row_scale[r])), bias);
      } else {
        x = add(load(reinterpret_cast<const float*>(tile.sums + r * kStepBytes) + c), bias);
      }
      if (target.pre != nullptr) {
        store_columns(static_cast<T*>(target.pre) + row * target.pre_stride + column, x, left);
      }
      if (target.slope_of != nullptr) {
        if (target.dropout != nullptr) x = mul(x, load(multiplier + r * kPanel + c));
        const T* before = static_cast<const T*>(target.slope_of) + at;
        const Floats gate = load_columns(before, left);
        Floats after = activate<sizeof(T) == 4>(activation, gate);
        if (target.up_offset > 0) {
          const Floats up = load_columns(before + target.up_offset, left);
          store_columns(static_cast<T*>(target.out) + at + target.up_offset, mul(x, after), left);
          after = mul(after, up);
          x = mul(x, up);
        }
        x = mul(x, activation_slope<sizeof(T) == 4>(activation, gate));
        if (target.dropout != nullptr) after = mul(after, load(multiplier + r * kPanel + c));
        store_columns(static_cast<T*>(target.activated) + row * target.weight.out_features + column, after, left);
      } else {
        x = activate<sizeof(T) == 4>(activation, x);
        if (pair == Pair::kGate) {
          store(tile.gate + r * kPanel + c, x);
          continue;
        }
        if (pair == Pair::kUp) x = mul(x, load(tile.gate + r * kPanel + c));
        if (target.dropout != nullptr) x = mul(x, load(multiplier + r * kPanel + c));
      }
      store_columns(static_cast<T*>(target.out) + at, x, left);
    }
  }
}

// Whether it was one of the forms that are common.
template <typename T, bool kInt8, bool kKeepsPre>
FASTBERT_SIMD bool finish_common_tile(const GemmTarget& target, const Channels& channels, const Tile& tile, Pair pair) {
  const auto finish = [&](auto activation, auto its_pair) {
    finish_whole_tile<T, kInt8, kKeepsPre, activation(), its_pair()>(target, channels, tile);
    return true;
  };
  using std::integral_constant;
  constexpr integral_constant<Pair, Pair::kNone> alone{};
  constexpr integral_constant<Pair, Pair::kGate> gate{};
  constexpr integral_constant<Activation, Activation::kNone> none{};
  if (pair == Pair::kUp) return finish(none, integral_constant<Pair, Pair::kUp>{});
  const bool is_gate = pair == Pair::kGate;
  switch (target.activation) {
    case Activation::kNone:
      return !is_gate && finish(none, alone);
    case Activation::kGelu: {
      constexpr integral_constant<Activation, Activation::kGelu> gelu{};
      return is_gate ? finish(gelu, gate) : finish(gelu, alone);
    }
    case Activation::kGeluTanh: {
      constexpr integral_constant<Activation, Activation::kGeluTanh> gelu{};
      return is_gate ? finish(gelu, gate) : finish(gelu, alone);
    }
    case Activation::kSilu:
      return is_gate && finish(integral_constant<Activation, Activation::kSilu>{}, gate);
    default:
      return false;
  }
}

template <typename T, bool kInt8>
FASTBERT_SIMD void finish_tile(const GemmTarget& target, const Channels& channels, const Tile& tile, Pair pair) {
  if (target.weight.out_features - tile.column >= kPanel && target.dropout == nullptr) {
    if (target.slope_of == nullptr) {
      if (target.pre == nullptr && finish_common_tile<T, kInt8, false>(target, channels, tile, pair)) return;
      if (!kInt8 && target.pre != nullptr && finish_common_tile<T, false, true>(target, channels, tile, pair)) return;
    } else if (!kInt8 && target.up_offset == 0) {
      if (target.activation == Activation::kGelu) {
        return finish_slope_tile<T, Activation::kGelu>(target, channels, tile);
      }
      if (target.activation == Activation::kGeluTanh) {
        return finish_slope_tile<T, Activation::kGeluTanh>(target, channels, tile);
      }
    }
  }
  finish_any_tile<T>(target, channels, tile, pair);
}
