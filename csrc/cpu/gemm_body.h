// Packing and GEMM for one ISA; included by gemm.cpp through foreach_isa.h.
#include "../include/gemm_tile.h"

// One element as four-byte steps want it.
template <typename To, typename From>
FASTBERT_SIMD To convert(From x) {
  return from_float<To>(to_float(x));
}
template <>
FASTBERT_SIMD int8_t convert<int8_t, int8_t>(int8_t x) {
  return x;
}

template <typename To, typename From>
void pack_typed(const PackArgs& args, int64_t begin, int64_t end) {
  constexpr int64_t kPerStep = 4 / sizeof(To);
  const auto* weight = static_cast<const From*>(args.weight);
  const int64_t k = args.in_features, steps = (k + kPerStep - 1) / kPerStep;
  for (int64_t p = begin; p < end; ++p) {
    To* out = reinterpret_cast<To*>(args.packed + p * panel_bytes(args.format, k));
    const int64_t first = p * kPanel, columns = std::min(kPanel, args.out_features - first);
    if (columns < kPanel || k % kPerStep != 0) std::memset(out, 0, static_cast<size_t>(steps) * kPanel * 4);
    // Blocks of 16 steps: the 64 rows that they read and the 4 KB that they write stay in the first-level cache.
    for (int64_t block = 0; block < k; block += 16 * kPerStep) {
      const int64_t block_end = std::min(k, block + 16 * kPerStep);
      if (args.out_stride == 1) {
        for (int64_t i = block; i < block_end; ++i) {
          const From* row = weight + i * args.in_stride + first;
          To* to = out + i / kPerStep * kPanel * kPerStep + i % kPerStep;
          for (int64_t c = 0; c < columns; ++c) to[c * kPerStep] = convert<To>(row[c]);
        }
      } else {
        for (int64_t c = 0; c < columns; ++c) {
          const From* row = weight + (first + c) * args.out_stride;
          for (int64_t i = block; i < block_end; ++i) {
            out[(i / kPerStep * kPanel + c) * kPerStep + i % kPerStep] = convert<To>(row[i * args.in_stride]);
          }
        }
      }
    }
    if constexpr (sizeof(To) == 1) {
      for (int64_t c = 0; c < kPanel; ++c) {
        int32_t sum = 0;
        for (int64_t i = 0; i < steps * kPerStep; ++i) sum += out[(i / kPerStep * kPanel + c) * kPerStep + i % kPerStep];
        args.channel_sum[first + c] = sum;
      }
    }
  }
}

void pack_panels(const PackArgs& args, int64_t begin, int64_t end) {
  if (args.format == DType::kInt8) return pack_typed<int8_t, int8_t>(args, begin, end);
  const bool from_float32 = args.dtype == DType::kFloat32;
  if (args.format == DType::kBFloat16) {
    return from_float32 ? pack_typed<BFloat16, float>(args, begin, end)
                        : pack_typed<BFloat16, BFloat16>(args, begin, end);
  }
  from_float32 ? pack_typed<float, float>(args, begin, end) : pack_typed<float, BFloat16>(args, begin, end);
}

// The rows of x as the tiles read them: in the weight's format, or where they lie if they are that already.
struct Rows {
  const char* data;
  int64_t stride;      // bytes
  const float* scale;  // int8: one a row
};

// A thread's scratch memory, kept from call to call: fresh pages cost more than what is done with them.
struct Scratch {
  std::vector<char> bytes;
  char* get(int64_t size) {
    if (static_cast<int64_t>(bytes.size()) < size) bytes.resize(static_cast<size_t>(size));
    return bytes.data();
  }
};

template <typename T>
void convert_rows(const T* x, int64_t x_stride, int64_t rows, int64_t k, int64_t stride, DType format, char* out) {
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

template <typename T>
void quantize_rows(const T* x, int64_t x_stride, int64_t rows, int64_t k, int64_t stride, float given_scale, char* out,
                   float* scales) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * x_stride;
    auto* to = reinterpret_cast<uint8_t*>(out + r * stride);
    // What is not finite makes the whole row NaN: no integer could stand for it.
    Floats largest_v = set1(0.0f), poison_v = set1(0.0f);
    float top = 0.0f, poison = 0.0f;
    int64_t i = 0;
    for (; i + kWidth <= k; i += kWidth) {
      const Floats v = load(row + i);
      largest_v = max(largest_v, abs(v));
      poison_v = fma(v, set1(0.0f), poison_v);
    }
    for (; i < k; ++i) {
      top = std::max(top, std::fabs(to_float(row[i])));
      poison += to_float(row[i]) * 0.0f;
    }
    top = std::max(top, largest(largest_v));
    poison += sum(poison_v);
    const float scale = given_scale > 0.0f ? given_scale : top / 127.0f;
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    scales[r] = scale + poison;
    std::memset(to + stride - 4, 128, 4);
    for (i = 0; i + kWidth <= k; i += kWidth) {
      const Floats v = mul(load(row + i), set1(inverse));
      store_bytes(to + i, to_ints(add(min(set1(127.0f), max(set1(-127.0f), round(v))), set1(128.0f))));
    }
    for (; i < k; ++i) {
      const float v = std::nearbyint(to_float(row[i]) * inverse);
      to[i] = static_cast<uint8_t>(std::min(127.0f, std::max(-127.0f, v)) + 128.0f);
    }
  }
}

template <typename T>
Rows prepare_typed(const T* x, DType x_dtype, int64_t x_stride, int64_t rows, const PackedWeight& weight,
                   Scratch& scratch, std::vector<float>& scales) {
  const int64_t k = weight.in_features, size = element_size(weight.format);
  const int64_t stride = (k * size + 3) / 4 * 4;
  if (weight.format == x_dtype && stride == k * size) {
    return {reinterpret_cast<const char*>(x), x_stride * size, nullptr};
  }
  char* out = scratch.get(rows * stride);
  if (weight.format == DType::kInt8) {
    scales.resize(static_cast<size_t>(rows));
    quantize_rows(x, x_stride, rows, k, stride, weight.input_scale, out, scales.data());
    return {out, stride, scales.data()};
  }
  convert_rows(x, x_stride, rows, k, stride, weight.format, out);
  return {out, stride, nullptr};
}

// What a tile's sums still need: scales, bias, activation, and the way out.
template <typename T>
void finish_tile(const GemmTarget& target, const float* bias, const float* row_scale, int64_t row, int64_t rows,
                 int64_t column, const char* sums) {
  const PackedWeight& weight = target.weight;
  const int64_t columns = std::min(kPanel, weight.out_features - column);
  const bool is_int8 = weight.format == DType::kInt8;
  float line[kPanel], scale[kPanel] = {};
  if (is_int8) std::memcpy(scale, weight.channel_scale + column, static_cast<size_t>(columns) * 4);
  for (int64_t r = 0; r < rows; ++r) {
    T* out = static_cast<T*>(target.out) + (row + r) * target.out_stride + column;
    T* pre = target.pre == nullptr ? nullptr : static_cast<T*>(target.pre) + (row + r) * target.out_stride + column;
    const char* sum = sums + r * kStepBytes;
    for (int64_t c = 0; c < columns; c += kWidth) {
      Floats x;
      if (is_int8) {
        const Ints exact = sub(load(reinterpret_cast<const int32_t*>(sum) + c),
                               mul(load(weight.channel_sum + column + c), set1(128)));
        x = mul(to_floats(exact), mul(load(scale + c), set1(row_scale[r])));
      } else {
        x = load(reinterpret_cast<const float*>(sum) + c);
      }
      x = add(x, load(bias + column + c));
      if (pre != nullptr) {
        if (c + kWidth <= columns) {
          store(pre + c, x);
        } else {
          store(line, x);
          for (int64_t i = c; i < columns; ++i) pre[i] = from_float<T>(line[i - c]);
        }
      }
      if (target.activation != Activation::kNone) x = activate<sizeof(T) == 4>(target.activation, x);
      if (c + kWidth <= columns) {
        store(out + c, x);
      } else {
        store(line, x);
        for (int64_t i = c; i < columns; ++i) out[i] = from_float<T>(line[i - c]);
      }
    }
  }
}

template <typename Dot>
void gemm_panels(const GemmArgs& args, const GemmTarget& target, const Rows& x, int64_t row_begin, int64_t row_end,
                 int64_t begin, int64_t end, const float* bias) {
  const int64_t bytes = panel_bytes(target.weight.format, target.weight.in_features), steps = bytes / kStepBytes;
  alignas(64) char sums[kTileRows * kStepBytes];
  for (int64_t p = begin; p < end; ++p) {
    const char* panel = target.weight.packed + p * bytes;
    const int64_t columns = std::min(kPanel, target.weight.out_features - p * kPanel);
    for (int64_t row = row_begin; row < row_end; row += kTileRows) {
      const int64_t rows = std::min<int64_t>(kTileRows, row_end - row), local = row - row_begin;
      tile_rows<Dot>(rows, x.data + local * x.stride, x.stride, 4, panel, steps, columns, false, sums);
      const float* row_scale = x.scale == nullptr ? nullptr : x.scale + local;
      if (args.out_dtype == DType::kFloat32) {
        finish_tile<float>(target, bias, row_scale, row, rows, p * kPanel, sums);
      } else {
        finish_tile<BFloat16>(target, bias, row_scale, row, rows, p * kPanel, sums);
      }
    }
  }
}

void gemm(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  static thread_local Scratch scratch;
  static thread_local std::vector<float> scales, bias;
  Rows x{nullptr, 0, nullptr};
  const PackedWeight* prepared = nullptr;  // the weight that x was prepared for
  int64_t first = 0;
  for (int64_t t = 0; t < args.num_targets; ++t) {
    const GemmTarget& target = args.targets[t];
    const PackedWeight& weight = target.weight;
    const int64_t panels = num_panels(weight.out_features);
    const int64_t begin = std::max<int64_t>(panel_begin - first, 0), end = std::min(panel_end - first, panels);
    first += panels;
    if (begin >= end) continue;
    if (prepared == nullptr || prepared->format != weight.format || prepared->input_scale != weight.input_scale) {
      x = args.x_dtype == DType::kFloat32
              ? prepare_typed(static_cast<const float*>(args.x) + row_begin * args.x_stride, args.x_dtype,
                              args.x_stride, row_end - row_begin, weight, scratch, scales)
              : prepare_typed(static_cast<const BFloat16*>(args.x) + row_begin * args.x_stride, args.x_dtype,
                              args.x_stride, row_end - row_begin, weight, scratch, scales);
      prepared = &weight;
    }
    bias.assign(static_cast<size_t>(panels * kPanel), 0.0f);
    if (target.bias != nullptr) {
      for (int64_t i = begin * kPanel; i < std::min(end * kPanel, weight.out_features); ++i) {
        bias[static_cast<size_t>(i)] = target.bias_dtype == DType::kFloat32
                                           ? static_cast<const float*>(target.bias)[i]
                                           : to_float(static_cast<const BFloat16*>(target.bias)[i]);
      }
    }
    switch (weight.format) {
      case DType::kFloat32:
        gemm_panels<Float32Dot>(args, target, x, row_begin, row_end, begin, end, bias.data());
        break;
      case DType::kBFloat16:
#if defined(FASTBERT_BF16)
        gemm_panels<BFloat16Dot>(args, target, x, row_begin, row_end, begin, end, bias.data());
#endif
        break;
      case DType::kInt8:
        gemm_panels<Int8Dot>(args, target, x, row_begin, row_end, begin, end, bias.data());
        break;
    }
  }
}
