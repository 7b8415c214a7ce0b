"""normalize: rows of length 1, whose dot products are cosines."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastbert.backend import Backend, register, select
from fastbert.native.availability import extension_error
from fastbert.ops._common import at_least_fp32, define, needs_grad

EPS = 1e-12  # torch.nn.functional.normalize's: the least that a row is divided by

_FWD_CPU = define(
    "normalize_cpu", "(Tensor x, float eps) -> Tensor", lambda x, eps: x.new_empty(x.shape, dtype=torch.float32)
)


def _supports_cpu(x: torch.Tensor) -> str | None:
    if x.device.type != "cpu":
        return f"tensors are on {x.device.type}"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {x.dtype} (has float32 and bfloat16)"
    if x.dim() != 2:
        return f"x has {x.dim()} dimensions, the kernels take (rows, width)"
    return "it has no backward" if needs_grad(x) else extension_error()


register("normalize", Backend.CPU, _supports_cpu, probe=lambda x, vector: (x,))


def normalize(x: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """x / ||x||, row by row: (rows, width) -> the same in float32, or in float64 if x is. A row of zeros stays zeros.

    Raises BackendError where the backend that was asked for cannot serve the call.
    """
    if select("normalize", backend, x) is Backend.CPU:
        return _FWD_CPU(x, EPS)
    return F.normalize(at_least_fp32(x), dim=-1, eps=EPS)
