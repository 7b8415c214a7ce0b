"""Dropout on its own, where no other op takes it along (Srivastava et al. 2014, section 4)."""

from __future__ import annotations

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops import _torch
from fastbert.ops._library import extension_error, needs_grad, triton_objection

_OPS = {
    Backend.CPU: torch.ops.fastbert.dropout_cpu,
    Backend.TRITON: torch.ops.fastbert.dropout_triton,
}


def _supports_cpu(x) -> str | None:
    if x.device.type != "cpu":
        return f"tensors are on {x.device.type}"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {x.dtype} (has float32 and bfloat16)"
    return extension_error()


def _probe(x, vector):
    return (x,)


register("dropout", Backend.CPU, _supports_cpu, probe=_probe)
register("dropout", Backend.TRITON, triton_objection, probe=_probe)


class _Dropout(torch.autograd.Function):
    """The mask is not kept: backward makes it again."""

    @staticmethod
    def forward(ctx, x, philox, dropout_p, backend):
        ctx.save_for_backward(philox)
        ctx.options = (dropout_p, backend)
        return _OPS[backend](x, philox, dropout_p)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        (philox,) = ctx.saved_tensors
        dropout_p, backend = ctx.options
        return _OPS[backend](dout, philox, dropout_p), None, None, None


def dropout(x: torch.Tensor, dropout_p: float, *, backend: str | None = None) -> torch.Tensor:
    """x (..., width) with each element zeroed with probability dropout_p, the others divided by 1 - dropout_p.

    Raises BackendError: the backend that was asked for cannot serve the call.
    """
    if dropout_p == 0:
        return x
    chosen = select("dropout", backend, x)
    if chosen is Backend.TORCH:
        return _torch.dropout(x, dropout_p)
    philox = torch.randint(2**62, (2,), dtype=torch.int64, device=x.device)
    if needs_grad(x):
        return _Dropout.apply(x, philox, dropout_p, chosen)
    return _OPS[chosen](x, philox, dropout_p)
