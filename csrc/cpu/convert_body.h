// A product's left side in its weight's format, for one ISA; included by gemm_body.h and maxsim_body.h.

// The rows of x as the tiles read them: in the weight's format, or where they lie if they are that already.
struct Rows {
  const char* data;
  int64_t stride;      // bytes
  const float* scale;  // int8: one a row
};

template <typename T>
void widen_rows(const T* x, int64_t x_stride, int64_t rows, int64_t k, int64_t stride, DType format, char* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * x_stride;
    char* to = out + r * stride;
    std::memset(to + stride - 4, 0, 4);  // the last step may be partly beyond the row
    int64_t i = 0;
    if (format == DType::kFloat32) {
      auto* floats = reinterpret_cast<float*>(to);
      for (; i + kWidth <= k; i += kWidth) store(floats + i, load(row + i));
      for (; i < k; ++i) floats[i] = to_float(row[i]);
    } else {
      auto* halves = reinterpret_cast<BFloat16*>(to);
      for (; i + kWidth <= k; i += kWidth) store(halves + i, load(row + i));
      for (; i < k; ++i) halves[i] = from_float<BFloat16>(to_float(row[i]));
    }
  }
}

// A row's largest absolute value, as its bits: bits order as the numbers do, what is not finite is above all of them,
// and integers leave the units of the products alone.
template <typename T>
int32_t largest_bits(const T* row, int64_t k) {
  Ints largest_v[4] = {set1(0), set1(0), set1(0), set1(0)};
  int64_t i = 0;
  for (; i + 4 * kWidth <= k; i += 4 * kWidth) {
    for (int64_t u = 0; u < 4; ++u) largest_v[u] = max(largest_v[u], (Ints)abs(load(row + i + u * kWidth)));
  }
  int32_t top = largest(max(max(largest_v[0], largest_v[1]), max(largest_v[2], largest_v[3])));
  for (; i < k; ++i) {
    const float magnitude = std::fabs(to_float(row[i]));
    int32_t bits;
    std::memcpy(&bits, &magnitude, 4);
    top = std::max(top, bits);
  }
  return top;
}

// kClamps: beyond +-127 there is something, as there may be with a scale that was given.
template <typename T, bool kClamps>
void quantize_row(const T* row, int64_t k, float inverse, uint8_t* to) {
  int64_t i = 0;
  for (; i + kWidth <= k; i += kWidth) {
    Floats v = mul(load(row + i), set1(inverse));
    if constexpr (kClamps) v = min(set1(127.0f), max(set1(-127.0f), v));
    store_bytes(to + i, add(to_ints(v), set1(128)));
  }
  for (; i < k; ++i) {
    const float v = std::nearbyint(to_float(row[i]) * inverse);
    to[i] = static_cast<uint8_t>(std::min(127.0f, std::max(-127.0f, v)) + 128.0f);
  }
}

template <typename T>
void quantize_rows(const T* x, int64_t x_stride, int64_t rows, int64_t k, int64_t stride, float given_scale, char* out,
                   float* scales) {
  constexpr int32_t kInfinity = 0x7f800000;
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * x_stride;
    auto* to = reinterpret_cast<uint8_t*>(out + r * stride);
    const int32_t bits = largest_bits(row, k);
    float top;
    std::memcpy(&top, &bits, 4);
    const float scale = given_scale > 0.0f ? given_scale : top / 127.0f;
    // A scale so small that its inverse overflows stands for a row of zeros.
    const float inverse = scale > 1.2e-38f ? 1.0f / scale : 0.0f;
    // What is not finite makes the whole row NaN: no integer could stand for it.
    scales[r] = bits < kInfinity ? scale : std::nanf("");
    std::memset(to + stride - 4, 128, 4);
    given_scale > 0.0f ? quantize_row<T, true>(row, k, inverse, to) : quantize_row<T, false>(row, k, inverse, to);
  }
}

template <typename T>
void convert_typed(const RowsArg& x, int64_t begin, int64_t end, const PackedWeight& weight, char* out, float* scales) {
  const T* from = static_cast<const T*>(x.data) + begin * x.stride;
  const int64_t k = weight.in_features, stride = row_bytes(weight.format, k), rows = end - begin;
  if (weight.format == DType::kInt8) {
    quantize_rows(from, x.stride, rows, k, stride, weight.input_scale, out + begin * stride, scales + begin);
  } else {
    widen_rows(from, x.stride, rows, k, stride, weight.format, out + begin * stride);
  }
}

// A product's left side in the weight's format. Its memory is the thread's own.
struct Prepared {
  Scratch scratch;
  std::vector<float> scales;

  Rows prepare(const RowsArg& x, int64_t row, int64_t rows, const PackedWeight& weight) {
    const int64_t stride = row_bytes(weight.format, weight.in_features);
    const int64_t x_stride = x.stride * element_size(x.dtype);
    const char* first = static_cast<const char*>(x.data) + row * x_stride;
    if (weight.format == x.dtype && (x.scales != nullptr || stride == weight.in_features * element_size(x.dtype))) {
      return {first, x_stride, x.scales == nullptr ? nullptr : x.scales + row};
    }
    char* out = scratch.get(rows * stride);
    scales.resize(static_cast<size_t>(rows));
    const RowsArg from{first, x.dtype, x.stride};
    x.dtype == DType::kFloat32 ? convert_typed<float>(from, 0, rows, weight, out, scales.data())
                               : convert_typed<BFloat16>(from, 0, rows, weight, out, scales.data());
    return {out, stride, weight.format == DType::kInt8 ? scales.data() : nullptr};
  }
};
