// The products of a feed-forward are cuBLASLt's, through torch: addmm has the bias in their epilogue, so that a kernel
// reads the wide matrix once and writes it once, in inference in place. What stands between them is ours.
//
// The activation in cuBLASLt's epilogue too (GELU_AUX_BIAS forward, DGELU_BGRAD backward) would move less. By columns
// of the wide matrix in 2 bytes, and per token: forward for backward's sake 2 instead of 3 trips, for inference 1
// instead of 3, backward 4 instead of 5, or 2 if forward kept inner as well. With intermediate_size 3072 a trip is 6144
// bytes. It is not used: those epilogues know the tanh GELU alone, which is ALBERT's and nobody else's among our
// families, and torch hands out neither their second result nor the backward one.

#include "../../cuda/feed_forward.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "../activation.h"
#include "launch.h"
#include "operators.h"

namespace fastbert {
namespace {

// a b, and bias + a b. libtorch's own kernels, not its dispatcher: autocast, which chose the operands' dtype, must not
// choose again, for kernels read what the products give as it is.
Array mm(const Array& a_, const Array& b_) {
  const Array a = as_tensor(a_), b = as_tensor(b_), out = empty({a.size(0), b.size(1)}, a);
  call(aoti_torch_cuda_mm_out(out.handle(), a.handle(), b.handle()), "mm");
  return out;
}

Array addmm(const Array& bias, const Array& a_, const Array& b_) {
  const Array a = as_tensor(a_), b = as_tensor(b_), out = empty({a.size(0), b.size(1)}, a);
  call(aoti_torch_cuda_addmm_out(out.handle(), bias.handle(), a.handle(), b.handle(), 1.0, 1.0), "addmm");
  return out;
}

int64_t up_size(const Array& down_weight, bool gated) {
  check(down_weight.dim() == 2, "down_weight has shape ", down_weight.sizes(),
        ", expected (hidden_size, intermediate_size)");
  return (gated ? 2 : 1) * down_weight.size(1);
}

void check_rows(const char* name, const Array& t) {
  check(t.dim() == 2, name, " has shape ", t.sizes(), ", expected (total_tokens, hidden_size)");
}

}  // namespace

std::tuple<Array, Array> feed_forward_cuda(const Array& x_, const Array& up_weight_, const OptionalArray& up_bias_,
                                           const Array& down_weight_, const std::string& activation, bool gated,
                                           bool return_pre) {
  check_rows("x", x_);
  const ScalarType dtype = x_.scalar_type();
  const Device device = x_.device();
  const int64_t rows = x_.size(0), width = up_size(down_weight_, gated);
  const Array up_weight = checked("up_weight", up_weight_, {width, x_.size(1)}, dtype, device);
  const Array up_bias = checked_if_defined("up_bias", up_bias_, {width}, dtype, device);
  const Array down_weight = checked("down_weight", down_weight_, down_weight_.sizes(), dtype, device);
  const int64_t columns = down_weight.size(1);

  const Array pre = up_bias.defined() ? addmm(up_bias, x_, up_weight.t()) : mm(x_, up_weight.t());
  // A gated inner in pre's memory would have gaps between its rows, for which cuBLAS may take another kernel than in
  // training, and so give other bits.
  const Array inner = return_pre || gated ? empty({rows, columns}, pre) : pre;
  const ActivationFwdArgs args{storage_of(dtype), activation_of(activation), gated, pre.data<const void>(), rows,
                               columns,           inner.data<void>()};
  launch_for(pre, launch_activation_fwd, args);
  return {mm(inner, down_weight.t()), return_pre ? pre : empty({0, width}, pre)};
}

std::tuple<Array, Array, Array, Array> feed_forward_bwd_cuda(const Array& dout_, const Array& x_, const Array& pre_,
                                                             const Array& up_weight_, const Array& down_weight_,
                                                             const std::string& activation, bool gated, bool needs_dx,
                                                             bool needs_dweight, bool needs_dbias) {
  check_rows("x", x_);
  const ScalarType dtype = x_.scalar_type();
  const Device device = x_.device();
  const int64_t rows = x_.size(0), width = up_size(down_weight_, gated);
  const Array dout = checked("dout", dout_, {rows, down_weight_.size(0)}, dtype, device);
  const Array pre = checked("pre", pre_, {rows, width}, dtype, device);
  const Array up_weight = checked("up_weight", up_weight_, {width, x_.size(1)}, dtype, device);
  const Array down_weight = checked("down_weight", down_weight_, down_weight_.sizes(), dtype, device);

  // Ours, and of the shape of one of the results.
  const Array dinner = mm(dout, down_weight);
  const Array dpre = gated ? empty_like(pre) : dinner, inner = gated ? dinner : empty_like(pre);
  const Array dbias = empty({needs_dbias ? width : 0}, pre);
  const Array shares = empty({needs_dbias ? activation_bwd_shares(rows) : 0, width}, ScalarType::Float, device);
  const ActivationBwdArgs args{storage_of(dtype),           activation_of(activation), gated,
                               dinner.data<const void>(),   pre.data<const void>(),    rows,
                               down_weight.size(1),         dpre.data<void>(),         inner.data<void>(),
                               data_if(needs_dbias, dbias), shares.data<float>()};
  launch_for(pre, launch_activation_bwd, args);
  return {needs_dx ? mm(dpre, up_weight) : empty({0, x_.size(1)}, x_),
          needs_dweight ? mm(dpre.t(), x_) : empty({0, up_weight.size(1)}, up_weight), dbias,
          needs_dweight ? mm(dout.t(), inner) : empty({0, down_weight.size(1)}, down_weight)};
}

}  // namespace fastbert
