"""add_layer_norm and add_rms_norm: bias + dropout + residual + norm in one pass.

LayerNorm: Ba et al. 2016, section 3, eq. 4. RMSNorm: Zhang & Sennrich 2019, eq. 4. The operators are the same for both:
RMSNorm is LayerNorm with a mean of 0 and without a bias, and `rms` says which it is. Its weight may be stored less 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from fastbert.backend import Backend, asked_for, register, select
from fastbert.native.availability import extension_error
from fastbert.ops._common import (
    Differentiable,
    Rule,
    at_least_fp32,
    check_devices,
    cuda_unsupported,
    define,
    define_triton,
    needs_grad,
    triton_unsupported,
)
from fastbert.ops.dropout import dropout_torch
from fastbert.ops.seeds import draw_seeds

# summed, (total_tokens, hidden_size): dropout(x + x_bias) + residual
# out, (total_tokens, hidden_size): (summed - mean) * rstd * weight + bias; mean, rstd: fp32 (total_tokens,)
#
# The sum is rounded to x's dtype before it is normalised: backward differentiates exactly what forward computed.
# With rms the mean is 0, rstd is 1 / sqrt(mean(summed^2) + eps), and mean and dbias are empty.
# philox is int64 (2,) = [seed, offset] on x's device, read only when dropout_p > 0. `summed` has zero rows unless
# return_sum; mean and rstd are empty unless return_stats. In backward dx has zero rows unless dropout_p > 0: without
# dropout it equals dsummed. dx_bias is fp32-accumulated over tokens and empty unless has_x_bias. zero_centered, of the
# CPU's: the norm's weight is 1 + weight. Triton's kernels take that in fp32 instead.

_FWD_SCHEMA = (
    "(Tensor x, Tensor? x_bias, Tensor? residual, Tensor weight, Tensor? bias, Tensor? philox, float dropout_p,"
    " float eps, bool return_sum, bool return_stats, bool rms=False)"
    " -> (Tensor out, Tensor summed, Tensor mean, Tensor rstd)"
)
_BWD_SCHEMA = (
    "(Tensor dout, Tensor? dsum, Tensor summed, Tensor mean, Tensor rstd, Tensor weight, Tensor? philox,"
    " float dropout_p, bool has_x_bias, bool rms=False)"
    " -> (Tensor dx, Tensor dsummed, Tensor dx_bias, Tensor dweight, Tensor dbias)"
)


def _fwd_fake(x, x_bias, residual, weight, bias, philox, dropout_p, eps, return_sum, return_stats, rms=False, *others):
    tokens, hidden_size = x.shape
    stats = tokens if return_stats else 0
    summed = x.new_empty(tokens if return_sum else 0, hidden_size)
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for rows in (0 if rms else stats, stats))
    return x.new_empty(tokens, hidden_size), summed, mean, rstd


def _bwd_fake(dout, dsum, summed, mean, rstd, weight, philox, dropout_p, has_x_bias, rms=False, *others):
    tokens, hidden_size = dout.shape
    dx = dout.new_empty(tokens if dropout_p > 0 else 0, hidden_size)
    dx_bias = weight.new_empty(hidden_size if has_x_bias else 0)
    dbias = weight.new_empty(0 if rms else hidden_size)
    return dx, dout.new_empty(tokens, hidden_size), dx_bias, torch.empty_like(weight), dbias


_FWD_CPU_SCHEMA = _FWD_SCHEMA.replace("bool rms=False", "bool rms=False, bool zero_centered=False")
_BWD_CPU_SCHEMA = _BWD_SCHEMA.replace("bool rms=False", "bool rms=False, bool zero_centered=False")

_FWD = {
    Backend.CPU: define("add_layer_norm_fwd_cpu", _FWD_CPU_SCHEMA, _fwd_fake),
    Backend.TRITON: define_triton("add_layer_norm_fwd", _FWD_SCHEMA, "layer_norm", _fwd_fake),
    Backend.CUDA: define("add_layer_norm_fwd_cuda", _FWD_SCHEMA, _fwd_fake),
}
_BWD = {
    Backend.CPU: define("add_layer_norm_bwd_cpu", _BWD_CPU_SCHEMA, _bwd_fake),
    Backend.TRITON: define_triton("add_layer_norm_bwd", _BWD_SCHEMA, "layer_norm", _bwd_fake),
    Backend.CUDA: define("add_layer_norm_bwd_cuda", _BWD_SCHEMA, _bwd_fake),
}


class NormOptions(NamedTuple):
    dropout_p: float
    eps: float
    rms: bool
    zero_centered: bool = False


def _add_norm_torch(x, residual, weight, bias, x_bias, options):
    if x_bias is not None:
        x = x + x_bias
    x = dropout_torch(x, options.dropout_p)
    summed = x if residual is None else x + residual
    if options.zero_centered:
        wide = at_least_fp32(summed)
        return F.rms_norm(wide, wide.shape[-1:], 1 + at_least_fp32(weight), options.eps).to(summed.dtype), summed
    if options.rms:
        return F.rms_norm(summed, summed.shape[-1:], weight, options.eps), summed
    return F.layer_norm(summed, summed.shape[-1:], weight, bias, options.eps), summed


def _supports_common(x, residual, weight, bias, x_bias) -> str | None:
    if x.dim() != 2:
        return f"x has {x.dim()} dimensions, the kernels take (total_tokens, hidden_size)"
    for name, t in (("residual", residual), ("weight", weight), ("bias", bias), ("x_bias", x_bias)):
        if t is None:
            continue
        expected = x.dtype if t is residual else weight.dtype
        if t.dtype != expected:
            return f"{name} is {t.dtype}, not {expected}"
    return None


def _supports_one_dtype(x, residual, weight, bias, x_bias) -> str | None:
    if weight.dtype != x.dtype:
        return f"weight is {weight.dtype}, x is {x.dtype}"
    return _supports_common(x, residual, weight, bias, x_bias)


def _supports_cpu(x, residual, weight, bias, x_bias=None, options=None) -> str | None:
    if x.device.type != "cpu":
        return f"tensors are on {x.device.type}"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {x.dtype} (has float32 and bfloat16)"
    return _supports_one_dtype(x, residual, weight, bias, x_bias) or extension_error()


def _supports_triton(x, residual, weight, bias, x_bias=None, options=None) -> str | None:
    if x.shape[-1] > 8192:
        return f"hidden_size {x.shape[-1]} is above 8192, where the backward's rows no longer fit in registers"
    if weight.dtype not in (x.dtype, torch.float32):
        return f"weight is {weight.dtype}, x is {x.dtype}"
    return triton_unsupported(x) or _supports_common(x, residual, weight, bias, x_bias)


def _supports_cuda(x, residual, weight, bias, x_bias=None, options=None) -> str | None:
    if options is not None and options.zero_centered:
        return "the weight is zero-centred"
    return cuda_unsupported(x) or _supports_one_dtype(x, residual, weight, bias, x_bias)


for _op in ("add_layer_norm", "add_rms_norm"):
    register(_op, Backend.CPU, _supports_cpu)
    register(_op, Backend.TRITON, _supports_triton)
    register(_op, Backend.CUDA, _supports_cuda)


def _launch(backend, options, x, residual, weight, bias, x_bias, philox, return_sum, return_stats):
    dropout_p, eps, rms, _ = options
    arguments = (x, x_bias, residual, weight, bias, philox, dropout_p, eps, return_sum, return_stats, rms)
    return _FWD[backend](*arguments, *_centering(backend, options))


def _centering(backend, options):
    return (options.zero_centered,) if backend is Backend.CPU else ()


def _forward(backend, options, x, residual, weight, bias, x_bias, philox):
    out, summed, mean, rstd = _launch(backend, options, x, residual, weight, bias, x_bias, philox, True, True)
    return (out, summed), (summed, mean, rstd, weight, philox)


def _backward(backend, options, needed, saved, dout, dsum):
    summed = saved[0]
    dout = torch.zeros_like(summed) if dout is None else dout.contiguous()
    dsum = None if dsum is None else dsum.contiguous()
    dx, dsummed, dx_bias, dweight, dbias = _BWD[backend](
        dout, dsum, *saved, options.dropout_p, needed[4], options.rms, *_centering(backend, options)
    )
    return dx if options.dropout_p > 0 else dsummed, dsummed, dweight, dbias, dx_bias, None


_RULE = Rule(_forward, _backward, materialize_grads=False)


def norm_alone(backend, x, weight, bias, eps):
    """LayerNorm of x, to which nothing is added: out, mean, rstd."""
    out, _, mean, rstd = _launch(backend, NormOptions(0.0, eps, False), x, None, weight, bias, None, None, False, True)
    return out, mean, rstd


def norm_alone_backward(backend, dout, x, mean, rstd, weight):
    """dx, dweight, dbias."""
    _, dx, _, dweight, dbias = _BWD[backend](dout.contiguous(), None, x, mean, rstd, weight, None, 0.0, False, False)
    return dx, dweight, dbias


def norm_dtype(x: torch.Tensor, backend: str | None) -> torch.dtype:
    """Of what a norm of x takes. Under autocast it is fp32, as LayerNorm has it there; but bf16 for Triton's kernels.

    They compute in fp32 from weights in fp32 all the same. What is rounded is the residual stream between layers, to
    the precision that every product rounds its operands to. In fp32 a step's LayerNorms, casts and additions would move
    three times as much. fp16, whose range a sum may leave, stays fp32.
    """
    if not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    asked = asked_for(backend)
    is_triton = asked is Backend.TRITON if asked is not None else x.device.type == "cuda"
    low = torch.get_autocast_dtype(x.device.type)
    return low if low is torch.bfloat16 and is_triton and triton_unsupported(x) is None else torch.float32


def _add_norm(op, x, residual, weight, bias, x_bias, prenorm, backend, options):
    check_devices(op, x=x, residual=residual, weight=weight, bias=bias, x_bias=x_bias)
    if torch.is_autocast_enabled(x.device.type):
        dtype = norm_dtype(x, backend)
        x, residual = x.to(dtype), None if residual is None else residual.to(dtype)
        weight = weight.float()
        bias, x_bias = (None if t is None else t.float() for t in (bias, x_bias))
    chosen = select(op, backend, x, residual, weight, bias, x_bias, options)
    if chosen is Backend.TORCH:
        out, summed = _add_norm_torch(x, residual, weight, bias, x_bias, options)
        return (out, summed) if prenorm else out
    if options.zero_centered and chosen is Backend.TRITON:
        weight = 1 + weight.float()
    philox = draw_seeds(x.device) if options.dropout_p > 0 else None
    operands = (x.contiguous(), None if residual is None else residual.contiguous(), weight, bias, x_bias)
    if needs_grad(*operands):
        out, summed = Differentiable.apply(_RULE, chosen, options, *operands, philox)
    else:
        out, summed, _, _ = _launch(chosen, options, *operands, philox, prenorm, False)
    return (out, summed) if prenorm else out


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    x_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-12,
    prenorm: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm(dropout(x + x_bias) + residual) * weight + bias, statistics in fp32.

    Args:
        x, residual: (total_tokens, hidden_size); `residual` None means zero.
        weight, bias, x_bias: (hidden_size,), in x's dtype, or in fp32 beside 16-bit matrices; `x_bias` is the bias of
            the projection that made x.
        dropout_p: probability of dropping an element of x + x_bias; 0 turns dropout off exactly.
        eps: added to the variance, in fp32.
        prenorm: also return the sum that was normalised, the residual stream of pre-norm models.
        backend: None follows `use_backend`; a name forces that backend for this call.

    Returns:
        out (total_tokens, hidden_size), or (out, summed) with `prenorm`, in x's dtype; under autocast in fp32, but in
        bf16 from the Triton kernels under autocast to bf16.

    Raises:
        ValueError: tensors on two devices. BackendError: the backend that was asked for cannot serve the call.
    """
    options = NormOptions(dropout_p, eps, False)
    return _add_norm("add_layer_norm", x, residual, weight, bias, x_bias, prenorm, backend, options)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    *,
    x_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-6,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm(dropout(x + x_bias) + residual) * weight: as `add_layer_norm`, without a mean and a bias.

    What is normalised is divided by the root of its mean square plus `eps`, in fp32, and rounded once, after the
    product with `weight`; with `zero_centered_weight`, with 1 + weight, which is a sum in fp32.
    """
    options = NormOptions(dropout_p, eps, True, zero_centered_weight)
    return _add_norm("add_rms_norm", x, residual, weight, None, x_bias, prenorm, backend, options)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, backend: str | None = None) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over rows (total_tokens, hidden_size): `add_rms_norm` of x alone."""
    out = add_rms_norm(x, None, weight, eps=eps, backend=backend)
    assert isinstance(out, torch.Tensor)  # it has no second result without prenorm
    return out
