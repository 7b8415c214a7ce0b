#include "../../cuda/feed_forward.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "../activation.h"
#include "launch.h"
#include "operators.h"

namespace fastbert {
namespace {

// What is written in place cannot be a copy.
void check_in_place(const char* name, const at::Tensor& t) {
  TORCH_CHECK(t.dim() == 2 && t.is_contiguous(), name, " has shape ", t.sizes(), " and strides ", t.strides(),
              ", expected (total_tokens, intermediate_size) without gaps");
}

}  // namespace

at::Tensor bias_activation_fwd_cuda(at::Tensor& pre, const std::optional<at::Tensor>& bias_,
                                    c10::string_view activation) {
  check_in_place("pre", pre);
  const at::Tensor bias = checked("bias", bias_, {pre.size(1)}, pre.scalar_type(), pre.device());
  const at::Tensor inner = at::empty_like(pre);
  const BiasActivationFwdArgs args{storage_of(pre.scalar_type()),
                                   activation_of(activation),
                                   data<void>(pre),
                                   data<const void>(bias),
                                   pre.size(0),
                                   pre.size(1),
                                   data<void>(inner)};
  launch_for(pre, launch_bias_activation_fwd, args);
  return inner;
}

std::tuple<at::Tensor, at::Tensor> activation_bwd_cuda(at::Tensor& dinner, const at::Tensor& pre_,
                                                       c10::string_view activation, bool needs_dbias) {
  check_in_place("dinner", dinner);
  const at::Tensor pre = checked("pre", pre_, dinner.sizes(), dinner.scalar_type(), dinner.device());
  const int64_t rows = pre.size(0), columns = pre.size(1);
  const at::Tensor inner = at::empty_like(pre), dbias = at::empty({needs_dbias ? columns : 0}, pre.options());
  const at::Tensor shares =
      at::empty({needs_dbias ? activation_bwd_shares(rows) : 0, columns}, pre.options().dtype(at::kFloat));
  const ActivationBwdArgs args{storage_of(pre.scalar_type()),
                               activation_of(activation),
                               data<void>(dinner),
                               data<const void>(pre),
                               rows,
                               columns,
                               data<void>(inner),
                               data_if(needs_dbias, dbias),
                               data<float>(shares)};
  launch_for(pre, launch_activation_bwd, args);
  return {inner, dbias};
}

}  // namespace fastbert
