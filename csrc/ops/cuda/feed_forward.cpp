// The products of a feed-forward are cuBLASLt's, through torch: addmm has the bias in their epilogue, so that a kernel
// reads the wide matrix once and writes it once, in inference in place. What stands between them is ours.
//
// The activation in cuBLASLt's epilogue too (GELU_AUX_BIAS forward, DGELU_BGRAD backward) would move less. By columns
// of the wide matrix in 2 bytes, and per token: forward for backward's sake 2 instead of 3 trips, for inference 1
// instead of 3, backward 4 instead of 5, or 2 if forward kept inner as well. With intermediate_size 3072 a trip is 6144
// bytes. It is not used: those epilogues know the tanh GELU alone, which is ALBERT's alone among our
// families, and torch hands out neither their second result nor the backward one.

#include "../../cuda/feed_forward.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "../activation.h"
#include "launch.h"
#include "operators.h"

namespace fastbert {
namespace {

// out = a b, and bias + a b, rows of `out` may be part of wider ones. libtorch's own kernels, not its dispatcher:
// autocast, which chose the operands' dtype, must not choose again, for kernels read what the products give as it is.
void mm_into(const Array& out_, const Array& a_, const Array& b_) {
  const Array out = as_tensor(out_), a = as_tensor(a_), b = as_tensor(b_);
  call(aoti_torch_cuda_mm_out(out.handle(), a.handle(), b.handle()), "mm");
}

void addmm_into(const Array& out_, const Array& bias, const Array& a_, const Array& b_) {
  const Array out = as_tensor(out_), a = as_tensor(a_), b = as_tensor(b_);
  call(aoti_torch_cuda_addmm_out(out.handle(), bias.handle(), a.handle(), b.handle(), 1.0, 1.0), "addmm");
}

Array mm(const Array& a, const Array& b) {
  const Array out = empty({a.size(0), b.size(1)}, a);
  mm_into(out, a, b);
  return out;
}

void check_rows(const char* name, const Array& t) {
  check(t.dim() == 2, name, " has shape ", t.sizes(), ", expected (total_tokens, hidden_size)");
}

// What both directions take, checked and whole.
struct Weights {
  Array up, gate, down;
  int64_t up_size, columns, width;  // rows of up, columns of down and of pre

  Weights(const Array& x, const Array& up_, const Array& down_, const OptionalArray& gate_, bool gated) {
    check(down_.dim() == 2, "down_weight has shape ", down_.sizes(), ", expected (hidden_size, intermediate_size)");
    const ScalarType dtype = x.scalar_type();
    const Device device = x.device();
    columns = down_.size(1);
    width = (gated ? 2 : 1) * columns;
    up_size = gate_.defined() ? columns : width;
    check(gated || !gate_.defined(), "there is a gate_weight, but gated is false");
    up = checked("up_weight", up_, {up_size, x.size(1)}, dtype, device);
    gate = checked_if_defined("gate_weight", gate_, {columns, x.size(1)}, dtype, device);
    down = checked("down_weight", down_, down_.sizes(), dtype, device);
  }
};

}  // namespace

std::tuple<Array, Array> feed_forward_cuda(const Array& x_, const Array& up_weight, const OptionalArray& up_bias_,
                                           const Array& down_weight, const OptionalArray& gate_weight,
                                           const OptionalArray& gate_bias_, const std::string& activation, bool gated,
                                           bool return_pre) {
  check_rows("x", x_);
  const ScalarType dtype = x_.scalar_type();
  const Device device = x_.device();
  const Weights weights(x_, up_weight, down_weight, gate_weight, gated);
  const int64_t rows = x_.size(0), columns = weights.columns;
  const Array up_bias = checked_if_defined("up_bias", up_bias_, {weights.up_size}, dtype, device);
  const Array gate_bias = checked_if_defined("gate_bias", gate_bias_, {columns}, dtype, device);

  const Array pre = empty({rows, weights.width}, x_);
  const auto product = [&](const Array& out, const Array& weight, const Array& bias) {
    bias.defined() ? addmm_into(out, bias, x_, weight.t()) : mm_into(out, x_, weight.t());
  };
  if (weights.gate.defined()) {
    product(pre.narrow(1, 0, columns), weights.gate, gate_bias);
    product(pre.narrow(1, columns, columns), weights.up, up_bias);
  } else {
    product(pre, weights.up, up_bias);
  }
  // A gated inner in pre's memory would have gaps between its rows, for which cuBLAS may take another kernel than in
  // training, and so give other bits.
  const Array inner = return_pre || gated ? empty({rows, columns}, pre) : pre;
  const ActivationFwdArgs args{storage_of(dtype), activation_of(activation), gated, pre.data<const void>(), rows,
                               columns,           inner.data<void>()};
  launch_for(pre, launch_activation_fwd, args);
  return {mm(inner, weights.down.t()), return_pre ? pre : empty({0, weights.width}, pre)};
}

std::tuple<Array, std::vector<Array>, std::vector<Array>, Array> feed_forward_bwd_cuda(
    const Array& dout_, const Array& x_, const Array& pre_, const Array& up_weight, const Array& down_weight,
    const OptionalArray& gate_weight, const std::string& activation, bool gated, bool needs_dx, bool needs_dweight,
    bool needs_dbias) {
  check_rows("x", x_);
  const ScalarType dtype = x_.scalar_type();
  const Device device = x_.device();
  const Weights weights(x_, up_weight, down_weight, gate_weight, gated);
  const int64_t rows = x_.size(0), columns = weights.columns, width = weights.width;
  const Array dout = checked("dout", dout_, {rows, down_weight.size(0)}, dtype, device);
  const Array pre = checked("pre", pre_, {rows, width}, dtype, device);

  // Ours, and of the shape of one of the results.
  const Array dinner = mm(dout, weights.down);
  const Array dpre = gated ? empty_like(pre) : dinner, inner = gated ? dinner : empty_like(pre);
  const bool two = weights.gate.defined();
  const Array dup_bias = empty({needs_dbias ? weights.up_size : 0}, pre);
  const Array dgate_bias = empty({needs_dbias && two ? columns : 0}, pre);
  const Array shares = empty({needs_dbias ? activation_bwd_shares(rows) : 0, width}, ScalarType::Float, device);
  const ActivationBwdArgs args{storage_of(dtype),
                               activation_of(activation),
                               gated,
                               dinner.data<const void>(),
                               pre.data<const void>(),
                               rows,
                               columns,
                               dpre.data<void>(),
                               inner.data<void>(),
                               data_if(needs_dbias, two ? dgate_bias : dup_bias),
                               shares.data<float>(),
                               data_if(needs_dbias && two, dup_bias)};
  launch_for(pre, launch_activation_bwd, args);

  // In the order of pre.
  std::vector<Array> parts{dpre}, ups{weights.up}, dups, dup_biases;
  if (two) {
    parts = {dpre.narrow(1, 0, columns), dpre.narrow(1, columns, columns)};
    ups.insert(ups.begin(), weights.gate);
    if (needs_dbias) dup_biases.push_back(dgate_bias);
  }
  if (needs_dbias) dup_biases.push_back(dup_bias);
  const Array dx = empty({needs_dx ? rows : 0, x_.size(1)}, x_);
  for (size_t i = 0; i < ups.size(); ++i) {
    if (needs_dx) i == 0 ? mm_into(dx, parts[i], ups[i]) : addmm_into(dx, dx, parts[i], ups[i]);
    if (needs_dweight) dups.push_back(mm(parts[i].t(), x_));
  }
  return {dx, std::move(dups), std::move(dup_biases), needs_dweight ? mm(dout.t(), inner) : empty({0, columns}, pre)};
}

}  // namespace fastbert
