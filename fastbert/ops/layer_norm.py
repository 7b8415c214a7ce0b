"""add_layer_norm: bias + dropout + residual + LayerNorm in one pass (Ba et al. 2016, section 3, eq. 4)."""

from __future__ import annotations

import torch

from fastbert.backend import Backend, asked_for, register, select
from fastbert.ops import _torch
from fastbert.ops._checks import check_devices
from fastbert.ops._library import cuda_objection, extension_error, needs_grad, triton_objection

_FWD = {
    Backend.CPU: torch.ops.fastbert.add_layer_norm_fwd_cpu,
    Backend.TRITON: torch.ops.fastbert.add_layer_norm_fwd_triton,
    Backend.CUDA: torch.ops.fastbert.add_layer_norm_fwd_cuda,
}
_BWD = {
    Backend.CPU: torch.ops.fastbert.add_layer_norm_bwd_cpu,
    Backend.TRITON: torch.ops.fastbert.add_layer_norm_bwd_triton,
    Backend.CUDA: torch.ops.fastbert.add_layer_norm_bwd_cuda,
}


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


def _supports_cpu(x, residual, weight, bias, x_bias=None) -> str | None:
    if x.device.type != "cpu":
        return f"tensors are on {x.device.type}"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {x.dtype} (has float32 and bfloat16)"
    return _supports_one_dtype(x, residual, weight, bias, x_bias) or extension_error()


def _supports_triton(x, residual, weight, bias, x_bias=None) -> str | None:
    if x.shape[-1] > 8192:
        return f"hidden_size {x.shape[-1]} is above 8192, where the backward's rows no longer fit in registers"
    if weight.dtype not in (x.dtype, torch.float32):
        return f"weight is {weight.dtype}, x is {x.dtype}"
    return triton_objection(x) or _supports_common(x, residual, weight, bias, x_bias)


def _supports_cuda(x, residual, weight, bias, x_bias=None) -> str | None:
    return cuda_objection(x) or _supports_one_dtype(x, residual, weight, bias, x_bias)


register("add_layer_norm", Backend.CPU, _supports_cpu)
register("add_layer_norm", Backend.TRITON, _supports_triton)
register("add_layer_norm", Backend.CUDA, _supports_cuda)


class _AddLayerNorm(torch.autograd.Function):
    """Autograd around the registered forward and backward; statistics stay in fp32 between them."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, x_bias, philox, dropout_p, eps, backend):
        out, summed, mean, rstd = _FWD[backend](x, x_bias, residual, weight, bias, philox, dropout_p, eps, True, True)
        ctx.save_for_backward(summed, mean, rstd, weight, philox)
        ctx.options = (dropout_p, backend, residual is not None, bias is not None, x_bias is not None)
        ctx.set_materialize_grads(False)
        return out, summed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dsum):
        summed, mean, rstd, weight, philox = ctx.saved_tensors
        dropout_p, backend, has_residual, has_bias, has_x_bias = ctx.options
        if dout is None:
            dout = torch.zeros_like(summed)
        dx, dsummed, dx_bias, dweight, dbias = _BWD[backend](
            dout.contiguous(),
            None if dsum is None else dsum.contiguous(),
            summed,
            mean,
            rstd,
            weight,
            philox,
            dropout_p,
            has_x_bias,
        )
        return (
            dx if dropout_p > 0 else dsummed,
            dsummed if has_residual else None,
            dweight,
            dbias if has_bias else None,
            dx_bias if has_x_bias else None,
            None,
            None,
            None,
            None,
        )


def _autocast_dtype(x: torch.Tensor, backend: str | None) -> torch.dtype:
    """Of x and residual under autocast: fp32, as LayerNorm has it there; but bf16 before the Triton kernels.

    They compute in fp32 from weights in fp32 all the same. What is rounded is the residual stream between layers, to
    the precision that every product rounds its operands to. In fp32 a step's LayerNorms, casts and additions would move
    three times as much. fp16, whose range a sum may leave, stays fp32.
    """
    asked = asked_for(backend)
    is_triton = asked is Backend.TRITON if asked is not None else x.device.type == "cuda"
    low = torch.get_autocast_dtype(x.device.type)
    return low if low is torch.bfloat16 and is_triton and triton_objection(x) is None else torch.float32


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
    check_devices("add_layer_norm", x=x, residual=residual, weight=weight, bias=bias, x_bias=x_bias)
    if torch.is_autocast_enabled(x.device.type):
        dtype = _autocast_dtype(x, backend)
        x, residual = x.to(dtype), None if residual is None else residual.to(dtype)
        weight = weight.float()
        bias, x_bias = (None if t is None else t.float() for t in (bias, x_bias))
    chosen = select("add_layer_norm", backend, x, residual, weight, bias, x_bias)
    if chosen is Backend.TORCH:
        out, summed = _torch.add_layer_norm(x, residual, weight, bias, x_bias, dropout_p, eps)
        return (out, summed) if prenorm else out
    philox = torch.randint(2**62, (2,), dtype=torch.int64, device=x.device) if dropout_p > 0 else None
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    if needs_grad(x, residual, weight, bias, x_bias):
        out, summed = _AddLayerNorm.apply(x, residual, weight, bias, x_bias, philox, dropout_p, eps, chosen)
    else:
        out, summed, _, _ = _FWD[chosen](x, x_bias, residual, weight, bias, philox, dropout_p, eps, prenorm, False)
    return (out, summed) if prenorm else out
