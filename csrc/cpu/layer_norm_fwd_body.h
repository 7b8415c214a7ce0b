// Forward add_layer_norm for one ISA; included by layer_norm_fwd.cpp through foreach_isa.h.

// Chains of a row's sum: an addition need not wait for the one before, and no lane adds up more than 1/kRowLanes of a
// row, so rounding errors stay small.
constexpr int64_t kRowLanes = 64, kChains = kRowLanes / kWidth;

struct RowSum {
  Floats chain[kChains];

  RowSum() {
    for (int64_t c = 0; c < kChains; ++c) chain[c] = set1(0.0f);
  }
  FASTBERT_SIMD float total() {
    for (int64_t half = kChains / 2; half > 0; half /= 2) {
      for (int64_t c = 0; c < half; ++c) chain[c] = add(chain[c], chain[c + half]);
    }
    return sum(chain[0]);
  }
};

// An absent vector becomes `fill`, so that the rows know only one case; bf16 is widened once, not once a row.
template <typename T>
void widen_vector(const T* vector, int64_t n, int64_t padded, float fill, float* out, float offset = 0.0f) {
  for (int64_t i = 0; i < n; ++i) out[i] = vector == nullptr ? fill : to_float(vector[i]) + offset;
  for (int64_t i = n; i < padded; ++i) out[i] = 0.0f;
}

// kIsRms: there is no mean, and squares are added up where the row is made.
template <typename T, bool kIsRms, bool kHasResidual, bool kHasDropout>
void add_layer_norm_rows(const AddLayerNormFwd<T>& args, int64_t begin, int64_t end) {
  static thread_local Scratch scratch;
  const int64_t n = args.hidden_size, padded = (n + kRowLanes - 1) / kRowLanes * kRowLanes;
  auto* x_bias = reinterpret_cast<float*>(scratch.get(5 * padded * 4));
  float *weight = x_bias + padded, *bias = weight + padded, *row = bias + padded, *multiplier = row + padded;
  widen_vector(args.x_bias, n, padded, 0.0f, x_bias);
  widen_vector(args.weight, n, padded, 1.0f, weight, weight_offset(args.norm));
  widen_vector(args.bias, n, padded, 0.0f, bias);
  const int64_t whole = n / kRowLanes * kRowLanes;
  const float inverse_n = 1.0f / static_cast<float>(n);
  [[maybe_unused]] const DropoutMask mask = kHasDropout ? DropoutMask::of(args.dropout) : DropoutMask{};
  [[maybe_unused]] const auto counters = static_cast<uint64_t>((n + 3) / 4);

  for (int64_t r = begin; r < end; ++r) {
    const T* x = args.x + r * n;
    const T* residual = kHasResidual ? args.residual + r * n : nullptr;
    if constexpr (kHasDropout) draw_row(mask, static_cast<uint64_t>(r) * counters, n, multiplier);

    [[maybe_unused]] RowSum rough, centred_sum;
    RowSum squares;
    const auto add_up = [&](int64_t at, int64_t c, int64_t left) FASTBERT_INLINE_LAMBDA {
      Floats value = add(load_columns(x + at, left), load(x_bias + at));
      if constexpr (kHasDropout) value = mul(value, load_columns(multiplier + at, left));
      if constexpr (kHasResidual) value = add(value, load_columns(residual + at, left));
      // Rounded as backward will read it: with the statistics of the unrounded sum, the difference times rstd, which
      // is 1e6 for a constant row under eps 1e-12, would swamp the gradient.
      if constexpr (std::is_same_v<T, BFloat16>) value = rounded_to_bf16(value);
      store(row + at, value);
      if constexpr (kIsRms) {
        squares.chain[c] = fma(value, value, squares.chain[c]);
      } else {
        rough.chain[c] = add(rough.chain[c], value);
      }
    };
    for (int64_t i = 0; i < whole; i += kRowLanes) {
#pragma GCC unroll 16
      for (int64_t c = 0; c < kChains; ++c) add_up(i + c * kWidth, c, kWidth);
    }
    for (int64_t i = whole; i < n; i += kWidth) add_up(i, (i - whole) / kWidth, n - i);
    if (args.summed != nullptr) {
      for (int64_t i = 0; i < n; i += kWidth) store_columns(args.summed + r * n + i, load(row + i), n - i);
    }

    if (args.norm == Norm::kNone) {
      for (int64_t i = 0; i < n && args.out != nullptr; i += kWidth) {
        store_columns(args.out + r * n + i, load(row + i), n - i);
      }
      continue;
    }

    // The rounding error of a large mean is of the size of a small spread: what is left after centring is measured
    // too, and taken off. Beyond the row there are means, which centring makes zeros.
    const float rough_mean = kIsRms ? 0.0f : rough.total() * inverse_n;
    if constexpr (!kIsRms) {
      for (int64_t i = n; i < padded; ++i) row[i] = rough_mean;
      for (int64_t i = 0; i < padded; i += kRowLanes) {
#pragma GCC unroll 16
        for (int64_t c = 0; c < kChains; ++c) {
          const Floats centred = sub(load(row + i + c * kWidth), set1(rough_mean));
          centred_sum.chain[c] = add(centred_sum.chain[c], centred);
          squares.chain[c] = fma(centred, centred, squares.chain[c]);
        }
      }
    }
    const float left_mean = kIsRms ? 0.0f : centred_sum.total() * inverse_n;
    const float variance = std::max(squares.total() * inverse_n - left_mean * left_mean, 0.0f);
    const float rstd = 1.0f / std::sqrt(variance + args.eps);
    if (args.mean != nullptr) args.mean[r] = rough_mean + left_mean;
    if (args.rstd != nullptr) args.rstd[r] = rstd;

    T* out = args.out + r * n;
    const auto finish = [&](int64_t at, int64_t left) FASTBERT_INLINE_LAMBDA {
      Floats centred = load(row + at);
      if constexpr (!kIsRms) centred = sub(sub(centred, set1(rough_mean)), set1(left_mean));
      store_columns(out + at, fma(mul(centred, set1(rstd)), load(weight + at), load(bias + at)), left);
    };
    for (int64_t i = 0; i < whole; i += kWidth) finish(i, kWidth);
    for (int64_t i = whole; i < n; i += kWidth) finish(i, n - i);
  }
}

template <typename T, bool kIsRms>
void add_layer_norm_with(const AddLayerNormFwd<T>& args, int64_t begin, int64_t end) {
  const bool has_residual = args.residual != nullptr, has_dropout = args.dropout.p > 0.0;
  if (has_residual && has_dropout) return add_layer_norm_rows<T, kIsRms, true, true>(args, begin, end);
  if (has_residual) return add_layer_norm_rows<T, kIsRms, true, false>(args, begin, end);
  if (has_dropout) return add_layer_norm_rows<T, kIsRms, false, true>(args, begin, end);
  add_layer_norm_rows<T, kIsRms, false, false>(args, begin, end);
}

template <typename T>
void add_layer_norm_typed(const AddLayerNormFwd<T>& args, int64_t begin, int64_t end) {
  const bool is_rms = args.norm == Norm::kRms || args.norm == Norm::kZeroCenteredRms;
  is_rms ? add_layer_norm_with<T, true>(args, begin, end) : add_layer_norm_with<T, false>(args, begin, end);
}

void add_layer_norm_fwd(const AddLayerNormFwd<float>& args, int64_t begin, int64_t end) {
  add_layer_norm_typed(args, begin, end);
}

void add_layer_norm_fwd(const AddLayerNormFwd<BFloat16>& args, int64_t begin, int64_t end) {
  add_layer_norm_typed(args, begin, end);
}
