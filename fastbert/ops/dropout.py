"""Dropout on its own, where no other op takes it along (Srivastava et al. 2014, section 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastbert.backend import Backend, register, select
from fastbert.native.availability import extension_error
from fastbert.ops._common import Differentiable, Rule, define, define_triton, needs_grad, triton_unsupported
from fastbert.ops.seeds import draw_seeds

# x (rows, width) by the mask of philox, int64 (2,) = [seed, offset] on x's device, which add_layer_norm would have for
# the same rows. Backward is the same op over dout: the mask is not kept, but made again.
_SCHEMA = "(Tensor x, Tensor philox, float dropout_p) -> Tensor"


def _fake(x, philox, dropout_p):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_OPS = {
    Backend.CPU: define("dropout_cpu", _SCHEMA, _fake),
    Backend.TRITON: define_triton("dropout", _SCHEMA, "dropout", _fake),
}


def dropout_torch(x: torch.Tensor, p: float) -> torch.Tensor:
    return F.dropout(x, p) if p > 0 else x


def _supports_cpu(x) -> str | None:
    if x.device.type != "cpu":
        return f"tensors are on {x.device.type}"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {x.dtype} (has float32 and bfloat16)"
    return extension_error()


def _probe(x, vector):
    return (x,)


register("dropout", Backend.CPU, _supports_cpu, probe=_probe)
register("dropout", Backend.TRITON, triton_unsupported, probe=_probe)


def drop(backend, dropout_p, x, philox):
    """Forward, or backward of a gradient."""
    width = x.shape[-1]
    rows = x.reshape(x.numel() // width if width else 0, width)
    return _OPS[backend](rows, philox, dropout_p).view(x.shape)


def _forward(backend, dropout_p, x, philox):
    return drop(backend, dropout_p, x, philox), (philox,)


def _backward(backend, dropout_p, needed, saved, dout):
    return drop(backend, dropout_p, dout, *saved), None


_RULE = Rule(_forward, _backward)


def dropout(x: torch.Tensor, dropout_p: float, *, backend: str | None = None) -> torch.Tensor:
    """x (..., width) with each element zeroed with probability dropout_p, the others divided by 1 - dropout_p.

    Raises BackendError: the backend that was asked for cannot serve the call.
    """
    if dropout_p == 0:
        return x
    chosen = select("dropout", backend, x)
    if chosen is Backend.TORCH:
        return dropout_torch(x, dropout_p)
    philox = draw_seeds(x.device)
    if needs_grad(x):
        return Differentiable.apply(_RULE, chosen, dropout_p, x, philox)
    return drop(chosen, dropout_p, x, philox)
