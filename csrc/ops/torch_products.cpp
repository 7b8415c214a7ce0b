#include "torch_products.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <vector>

#include "packed_weights.h"
#include "register.h"
#include "tensors.h"
#include "workspace.h"

namespace fastbert {
namespace {

// Memory as rows and columns, strides in elements.
struct Matrix {
  const void* data;
  DType dtype;
  int64_t rows, columns, row_stride, column_stride;

  Matrix t() const { return {data, dtype, columns, rows, column_stride, row_stride}; }
};

Matrix matrix_of(const Array& a) { return {a.data(), dtype_of(a), a.size(0), a.size(1), a.stride(0), a.stride(1)}; }

Matrix matrix_of(const RowsArg& x, int64_t rows, int64_t columns) {
  return {x.data, x.dtype, rows, columns, x.stride, 1};
}

Matrix matrix_of(const PackArgs& weight) {
  return {weight.weight, weight.dtype, weight.out_features, weight.in_features, weight.out_stride, weight.in_stride};
}

ScalarType type_of(DType dtype) { return dtype == DType::kFloat32 ? ScalarType::Float : ScalarType::BFloat16; }

Array tensor_of(const Matrix& m) {
  return tensor_at(const_cast<void*>(m.data), {m.rows, m.columns}, {m.row_stride, m.column_stride}, type_of(m.dtype));
}

void copy_into(const Matrix& to, const Matrix& from) {
  call(aoti_torch_copy_(tensor_of(to).handle(), tensor_of(from).handle(), 0), "copy_");
}

// Whether torch has fast products of bfloat16. Where not, as on x86 without AVX2, they take 4 to 10 times as long as
// those of float32, and operands are widened, as our own products do it.
bool multiplies_bf16() {
#if defined(__x86_64__)
  return false;
#else
  static const bool has_them = [] {
    StableIValue stack[1]{};
    call(torch_call_dispatcher("mkldnn::_is_mkldnn_bf16_supported", "", stack, TORCH_ABI_VERSION),
         "to ask for bfloat16");
    return torch::stable::detail::to<bool>(stack[0]);
  }();
  return has_them;
#endif
}

// Whether a product's operands are to be float32.
bool are_widened(const Matrix& a, const Matrix& b, DType sums) {
  return a.dtype != b.dtype || a.dtype != sums || (a.dtype == DType::kBFloat16 && !multiplies_bf16());
}

// float32 of m, which lies as m does: m itself if it is that.
Matrix widened(const Matrix& m, Array& memory) {
  if (m.dtype == DType::kFloat32) return m;
  const bool has_whole_rows = m.column_stride == 1;
  memory = workspace(has_whole_rows ? Shape{m.rows, m.columns} : Shape{m.columns, m.rows}, ScalarType::Float);
  const Matrix wide = has_whole_rows ? matrix_of(memory) : matrix_of(memory).t();
  copy_into(wide, m);
  return wide;
}

// out = a b, or out + a b, in the dtype that all three have. libtorch's own kernels, not its dispatcher: autocast must
// not choose another dtype.
void product_into(const Matrix& out_, const Matrix& a_, const Matrix& b_, bool adds) {
  const Array out = tensor_of(out_), a = tensor_of(a_), b = tensor_of(b_);
  if (adds) {
    call(aoti_torch_cpu_addmm_out(out.handle(), out.handle(), a.handle(), b.handle(), 1.0, 1.0), "addmm");
  } else {
    call(aoti_torch_cpu_mm_out(out.handle(), a.handle(), b.handle()), "mm");
  }
}

// An int8 weight as floats. Products of integers are exact in float32 as long as their sums are below 2^24, as those of
// a model's weights are: torch's sums are then those that our own products have.
Array widened_int8(const PackedWeight& weight) {
  const PackArgs& source = weight.source;
  const Array wide = workspace({source.out_features, source.in_features}, ScalarType::Float);
  parallel_for(0, source.out_features, 1 + 16384 / (source.in_features + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto* from = static_cast<const int8_t*>(source.weight) + row * source.out_stride;
      float* to = wide.data<float>() + row * source.in_features;
      if (source.in_stride == 1) {  // a loop that the compiler makes vectors of
        for (int64_t i = 0; i < source.in_features; ++i) to[i] = static_cast<float>(from[i]);
      } else {
        for (int64_t i = 0; i < source.in_features; ++i) to[i] = static_cast<float>(from[i * source.in_stride]);
      }
    }
  });
  return wide;
}

// Rows rounded to int8 as our own products do it (convert_rows), as floats. scales (rows,) receives theirs.
Array rounded_rows(const RowsArg& x, int64_t rows, const PackedWeight& weight, float* scales) {
  const int64_t columns = weight.in_features, stride = row_bytes(DType::kInt8, columns);
  const Array bytes = workspace({rows, stride}, ScalarType::Byte);
  const Array wide = workspace({rows, columns}, ScalarType::Float);
  parallel_for(0, rows, 1 + 16384 / (columns + 1), [&](int64_t begin, int64_t end) {
    convert_rows(x, begin, end, weight, bytes.data<char>(), scales);
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* from = bytes.data<uint8_t>() + row * stride;
      float* to = wide.data<float>() + row * columns;
      for (int64_t i = 0; i < columns; ++i) to[i] = static_cast<float>(from[i] - 128);
    }
  });
  return wide;
}

// The left side of products: what several of them need of it is made once.
class LeftSide {
 public:
  LeftSide(const RowsArg& x, int64_t rows) : x_(x), rows_(rows) {}

  Matrix given(int64_t columns) const { return matrix_of(x_, rows_, columns); }

  Matrix wide(int64_t columns) {
    if (x_.dtype == DType::kFloat32) return given(columns);
    if (!wide_.defined()) widened(given(columns), wide_);
    return matrix_of(wide_);
  }

  // And its scales (rows,), until the next weight has another input_scale.
  Matrix rounded(const PackedWeight& weight, Array& scales) {
    if (!rounded_.defined() || input_scale_ != weight.input_scale) {
      input_scale_ = weight.input_scale;
      scales_ = workspace({rows_}, ScalarType::Float);
      rounded_ = rounded_rows(x_, rows_, weight, scales_.data<float>());
    }
    scales = scales_;
    return matrix_of(rounded_);
  }

 private:
  RowsArg x_;
  int64_t rows_;
  float input_scale_ = 0;
  Array wide_, rounded_, scales_;
};

// One target's sums.
class Sums {
 public:
  // Where they may, they lie where the result will.
  Sums(const GemmTarget& target, int64_t rows, DType out_dtype, bool may_lie_in_out)
      : target_(target), rows_(rows), out_dtype_(out_dtype), may_lie_in_out_(may_lie_in_out) {}

  void multiply(LeftSide& x, const PackedWeight& weight) {
    const int64_t in_features = weight.in_features, out_features = weight.out_features;
    Matrix a = x.given(in_features), b = matrix_of(weight.source);
    Array of_b;
    if (weight.format == DType::kInt8) {
      of_b = widened_int8(weight);
      a = x.rounded(weight, scales_), b = matrix_of(of_b);
    } else if (are_widened(a, b, sums_.data == nullptr ? a.dtype : sums_.dtype)) {
      a = x.wide(in_features), b = widened(b, of_b);
    }
    const bool adds = sums_.data != nullptr;
    if (!adds) {
      if (may_lie_in_out_ && a.dtype == out_dtype_) {
        sums_ = {target_.out, a.dtype, target_.out_stride};
      } else {
        memory_ = workspace({rows_, out_features}, type_of(a.dtype));
        sums_ = {memory_.data(), a.dtype, out_features};
      }
      sums_.scales = scales_.data<const float>();
    }
    product_into(matrix_of(sums_, rows_, out_features), a, b.t(), adds);
  }

  const RowsArg& get() const { return sums_; }

 private:
  const GemmTarget& target_;
  int64_t rows_;
  DType out_dtype_;
  bool may_lie_in_out_;
  Array memory_, scales_;
  RowsArg sums_{};
};

}  // namespace

void multiply_by_torch(const GemmArgs& args, int64_t rows,
                       const std::function<void(int64_t begin, int64_t end)>& done) {
  if (rows == 0) return;
  LeftSide x(args.x, rows);
  std::vector<Sums> sums, gates;
  for (int64_t t = 0; t < args.num_targets; ++t) {
    const GemmTarget& target = args.targets[t];
    sums.emplace_back(target, rows, args.out_dtype, target.up_offset == 0);
    sums.back().multiply(x, target.weight);
    for (int64_t i = 0; i < target.num_addends; ++i) {
      LeftSide addend(target.addends[i].x, rows);
      sums.back().multiply(addend, target.addends[i].weight);
    }
    gates.emplace_back(target, rows, args.out_dtype, false);
    if (target.gate != nullptr) gates.back().multiply(x, target.gate->weight);
  }
  parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (size_t t = 0; t < sums.size(); ++t) {
      finish_sums({args.targets[t], sums[t].get(), gates[t].get(), args.out_dtype}, begin, end);
    }
    if (done) done(begin, end);
  });
}

void weight_gradient_by_torch(const Array& dout, const Array& x, const Array& dweight) {
  Matrix a = matrix_of(dout), b = matrix_of(x), out = matrix_of(dweight);
  Array of_a, of_b, of_out;
  if (are_widened(a, b, out.dtype)) {
    a = widened(a, of_a), b = widened(b, of_b);
    if (out.dtype != DType::kFloat32) {
      of_out = workspace(dweight.sizes(), ScalarType::Float);
      out = matrix_of(of_out);
    }
  }
  product_into(out, a.t(), b, false);
  if (of_out.defined()) copy_into(matrix_of(dweight), out);
}

}  // namespace fastbert
