"""Every registered op on one page: schema, fake kernel, lazily imported implementation, and what it supports.

The backend stands in the op's name, so the choice is visible in profiles and compiled graphs, and each name has one
kernel per dispatch key (DESIGN 4.4). Autograd lives outside, in the op's own file. The C++ extension registers its
kernels when it is loaded; Triton kernels are imported by the functions below on their first call.
"""

from __future__ import annotations

import torch

# --------------------------------------------------------------------------------------------------------------------
# Availability: asked once, in `supports`, never at import.

_extension_error: str | None = "not asked yet"


def extension_error() -> str | None:
    """None when the C++ extension is loaded, else why it is not."""
    global _extension_error
    if _extension_error == "not asked yet":
        try:
            import fastbert._C  # noqa: F401  (loading it registers its kernels)

            _extension_error = None
        except ImportError as error:
            _extension_error = f"the C++ extension is not built ({error})"
    return _extension_error


_triton_error: str | None = "not asked yet"


def triton_error() -> str | None:
    """None when Triton can be imported, else why not."""
    global _triton_error
    if _triton_error == "not asked yet":
        try:
            import triton  # noqa: F401

            _triton_error = None
        except ImportError as error:
            _triton_error = f"Triton is not installed ({error})"
    return _triton_error


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo (0.7 s): a trace calls the two
# functions instead of tracing their imports, also when it is the process's first call.
extension_error._dynamo_marked_constant = True  # type: ignore[attr-defined]
triton_error._dynamo_marked_constant = True  # type: ignore[attr-defined]


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd must record this call."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# --------------------------------------------------------------------------------------------------------------------
# add_layer_norm
#
#   summed, (total_tokens, hidden_size): dropout(x + x_bias) + residual
#   out, (total_tokens, hidden_size): (summed - mean) * rstd * weight + bias; mean, rstd: fp32 (total_tokens,)
#
# The sum is rounded to x's dtype before it is normalised: backward differentiates exactly what forward computed.
# philox is int64 (2,) = [seed, offset] on x's device, read only when dropout_p > 0. `summed` has zero rows unless
# return_sum; mean and rstd are empty unless return_stats. In backward dx has zero rows unless dropout_p > 0: without
# dropout it equals dsummed. dx_bias is fp32-accumulated over tokens and empty unless has_x_bias.

_ADD_LAYER_NORM_FWD = (
    "(Tensor x, Tensor? x_bias, Tensor? residual, Tensor weight, Tensor? bias, Tensor? philox, float dropout_p,"
    " float eps, bool return_sum, bool return_stats) -> (Tensor out, Tensor summed, Tensor mean, Tensor rstd)"
)
_ADD_LAYER_NORM_BWD = (
    "(Tensor dout, Tensor? dsum, Tensor summed, Tensor mean, Tensor rstd, Tensor weight, Tensor? philox,"
    " float dropout_p, bool has_x_bias) -> (Tensor dx, Tensor dsummed, Tensor dx_bias, Tensor dweight, Tensor dbias)"
)


def _add_layer_norm_fwd_fake(x, x_bias, residual, weight, bias, philox, dropout_p, eps, return_sum, return_stats):
    tokens, hidden_size = x.shape
    stats = tokens if return_stats else 0
    summed = x.new_empty(tokens if return_sum else 0, hidden_size)
    mean, rstd = (x.new_empty(stats, dtype=torch.float32) for _ in range(2))
    return x.new_empty(tokens, hidden_size), summed, mean, rstd


def _add_layer_norm_bwd_fake(dout, dsum, summed, mean, rstd, weight, philox, dropout_p, has_x_bias):
    tokens, hidden_size = dout.shape
    dx = dout.new_empty(tokens if dropout_p > 0 else 0, hidden_size)
    dx_bias = weight.new_empty(hidden_size if has_x_bias else 0)
    return dx, dout.new_empty(tokens, hidden_size), dx_bias, torch.empty_like(weight), torch.empty_like(weight)


def _add_layer_norm_fwd_triton(*args):
    from fastbert.kernels.layer_norm import add_layer_norm_fwd

    return add_layer_norm_fwd(*args)


def _add_layer_norm_bwd_triton(*args):
    from fastbert.kernels.layer_norm import add_layer_norm_bwd

    return add_layer_norm_bwd(*args)


for _name in ("cpu", "triton"):
    torch.library.define(f"fastbert::add_layer_norm_fwd_{_name}", _ADD_LAYER_NORM_FWD)
    torch.library.define(f"fastbert::add_layer_norm_bwd_{_name}", _ADD_LAYER_NORM_BWD)
    torch.library.register_fake(f"fastbert::add_layer_norm_fwd_{_name}", _add_layer_norm_fwd_fake)
    torch.library.register_fake(f"fastbert::add_layer_norm_bwd_{_name}", _add_layer_norm_bwd_fake)
# The CPU key of the Triton ops exists for TRITON_INTERPRET=1, which is how they are tested without a GPU.
for _key in ("CUDA", "CPU"):
    torch.library.impl("fastbert::add_layer_norm_fwd_triton", _key, _add_layer_norm_fwd_triton)
    torch.library.impl("fastbert::add_layer_norm_bwd_triton", _key, _add_layer_norm_bwd_triton)


# --------------------------------------------------------------------------------------------------------------------
# attention
#
#   out, (total_tokens, num_heads, head_dim): dropout(softmax(q k^T * softmax_scale)) v within each sequence
#   softmax_stats, fp32 (2, num_heads, total_tokens): each query's top q k^T and its sum of
#     exp(softmax_scale * (q k^T - top)); two numbers, for their log-sum-exp in fp32 loses digits where scores are large
#
# philox as above; softmax_stats is (0, num_heads, total_tokens) unless return_stats. Results are contiguous whatever
# the strides of q, k and v, and zeros in slack rows.

_ATTENTION_FWD = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? philox, float softmax_scale, float dropout_p,"
    " bool return_stats) -> (Tensor out, Tensor softmax_stats)"
)
_ATTENTION_BWD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_stats, Tensor cu_seqlens, Tensor? philox,"
    " float softmax_scale, float dropout_p) -> (Tensor dq, Tensor dk, Tensor dv)"
)


def _attention_fwd_fake(q, k, v, cu_seqlens, philox, softmax_scale, dropout_p, return_stats):
    tokens, num_heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(2 if return_stats else 0, num_heads, tokens, dtype=torch.float32)


def _attention_bwd_fake(dout, q, k, v, out, softmax_stats, cu_seqlens, philox, softmax_scale, dropout_p):
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


torch.library.define("fastbert::attention_fwd_cpu", _ATTENTION_FWD)
torch.library.define("fastbert::attention_bwd_cpu", _ATTENTION_BWD)
torch.library.register_fake("fastbert::attention_fwd_cpu", _attention_fwd_fake)
torch.library.register_fake("fastbert::attention_bwd_cpu", _attention_bwd_fake)
