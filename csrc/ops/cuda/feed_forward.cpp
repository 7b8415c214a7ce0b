// The products of a feed-forward are cuBLASLt's, through ATen: addmm has the bias in their epilogue, so that a kernel
// reads the wide matrix once and writes it once, in inference in place. What stands between them is ours.
//
// The activation in cuBLASLt's epilogue too (GELU_AUX_BIAS forward, DGELU_BGRAD backward) would move less. By columns
// of the wide matrix in 2 bytes, and per token: forward for backward's sake 2 instead of 3 trips, for inference 1
// instead of 3, backward 4 instead of 5, or 2 if forward kept inner as well. With intermediate_size 3072 a trip is 6144
// bytes. It is not used: those epilogues know the tanh GELU alone, which is ALBERT's and nobody else's among our
// families, and torch hands out neither their second result nor the backward one.

#include "../../cuda/feed_forward.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../activation.h"
#include "launch.h"
#include "operators.h"

namespace fastbert {
namespace {

// Autocast, which chose the operands' dtype, must not choose again: kernels read what the products give as it is.
using WithoutAutocast = c10::impl::ExcludeDispatchKeyGuard;

int64_t up_size(const at::Tensor& down_weight, bool gated) {
  TORCH_CHECK(down_weight.dim() == 2, "down_weight has shape ", down_weight.sizes(),
              ", expected (hidden_size, intermediate_size)");
  return (gated ? 2 : 1) * down_weight.size(1);
}

void check_rows(const char* name, const at::Tensor& t) {
  TORCH_CHECK(t.dim() == 2, name, " has shape ", t.sizes(), ", expected (total_tokens, hidden_size)");
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> feed_forward_cuda(const at::Tensor& x_, const at::Tensor& up_weight_,
                                                     const std::optional<at::Tensor>& up_bias_,
                                                     const at::Tensor& down_weight_, c10::string_view activation,
                                                     bool gated, bool return_pre) {
  const WithoutAutocast without_autocast(c10::autocast_dispatch_keyset);
  check_rows("x", x_);
  const at::ScalarType dtype = x_.scalar_type();
  const at::Device device = x_.device();
  const int64_t rows = x_.size(0), width = up_size(down_weight_, gated);
  const at::Tensor up_weight = checked("up_weight", up_weight_, {width, x_.size(1)}, dtype, device);
  const at::Tensor up_bias = checked("up_bias", up_bias_, {width}, dtype, device);
  const at::Tensor down_weight = checked("down_weight", down_weight_, down_weight_.sizes(), dtype, device);
  const int64_t columns = down_weight.size(1);

  const at::Tensor pre = up_bias.defined() ? at::addmm(up_bias, x_, up_weight.t()) : at::mm(x_, up_weight.t());
  // A gated inner in pre's memory would have gaps between its rows, for which cuBLAS may take another kernel than in
  // training, and so give other bits.
  const at::Tensor inner = return_pre || gated ? at::empty({rows, columns}, pre.options()) : pre;
  const ActivationFwdArgs args{storage_of(dtype), activation_of(activation), gated, data<const void>(pre), rows,
                               columns,           data<void>(inner)};
  launch_for(pre, launch_activation_fwd, args);
  return {at::mm(inner, down_weight.t()), return_pre ? pre : at::empty({0, width}, pre.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> feed_forward_bwd_cuda(
    const at::Tensor& dout_, const at::Tensor& x_, const at::Tensor& pre_, const at::Tensor& up_weight_,
    const at::Tensor& down_weight_, c10::string_view activation, bool gated, bool needs_dx, bool needs_dweight,
    bool needs_dbias) {
  const WithoutAutocast without_autocast(c10::autocast_dispatch_keyset);
  check_rows("x", x_);
  const at::ScalarType dtype = x_.scalar_type();
  const at::Device device = x_.device();
  const int64_t rows = x_.size(0), width = up_size(down_weight_, gated);
  const at::Tensor dout = checked("dout", dout_, {rows, down_weight_.size(0)}, dtype, device);
  const at::Tensor pre = checked("pre", pre_, {rows, width}, dtype, device);
  const at::Tensor up_weight = checked("up_weight", up_weight_, {width, x_.size(1)}, dtype, device);
  const at::Tensor down_weight = checked("down_weight", down_weight_, down_weight_.sizes(), dtype, device);

  // Ours, and of the shape of one of the results.
  const at::Tensor dinner = at::mm(dout, down_weight);
  const at::Tensor dpre = gated ? at::empty_like(pre) : dinner, inner = gated ? dinner : at::empty_like(pre);
  const at::Tensor dbias = at::empty({needs_dbias ? width : 0}, pre.options());
  const at::Tensor shares =
      at::empty({needs_dbias ? activation_bwd_shares(rows) : 0, width}, pre.options().dtype(at::kFloat));
  const ActivationBwdArgs args{storage_of(dtype),           activation_of(activation), gated,
                               data<const void>(dinner),    data<const void>(pre),     rows,
                               down_weight.size(1),         data<void>(dpre),          data<void>(inner),
                               data_if(needs_dbias, dbias), data<float>(shares)};
  launch_for(pre, launch_activation_bwd, args);
  return {needs_dx ? at::mm(dpre, up_weight) : at::empty({0, x_.size(1)}, x_.options()),
          needs_dweight ? at::mm(dpre.t(), x_) : at::empty({0, up_weight.size(1)}, up_weight.options()), dbias,
          needs_dweight ? at::mm(dout.t(), inner) : at::empty({0, down_weight.size(1)}, down_weight.options())};
}

}  // namespace fastbert
