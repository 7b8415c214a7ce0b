"""pack and unpack: rows of a padded matrix to packed tokens, and back with zeros at padding."""

from __future__ import annotations

import math

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops import _torch
from fastbert.ops._checks import check_devices
from fastbert.ops._library import needs_grad, triton_objection

for _op in ("pack", "unpack"):
    register(_op, Backend.TRITON, triton_objection, probe=lambda x, vector: (x,))


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, indices):
        ctx.save_for_backward(indices)
        ctx.num_rows = x.shape[0]
        return torch.ops.fastbert.pack_triton(x, indices)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        (indices,) = ctx.saved_tensors
        return torch.ops.fastbert.unpack_triton(dout, indices, ctx.num_rows), None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed, indices, num_rows):
        ctx.save_for_backward(indices)
        return torch.ops.fastbert.unpack_triton(packed, indices, num_rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        (indices,) = ctx.saved_tensors
        return torch.ops.fastbert.pack_triton(dout, indices), None, None


def _check_indices(op: str, indices: torch.Tensor) -> None:
    """What a kernel takes for granted of them, but for their values."""
    if indices.dtype is not torch.int64 or indices.dim() != 1:
        found = f"{indices.dtype} of shape {tuple(indices.shape)}"
        raise ValueError(f"{op}: indices is {found}; it must be torch.int64 of shape (total_tokens,)")


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """(rows, ...) -> (rows, width), as the kernels take it."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def pack(x: torch.Tensor, indices: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """x[indices], the rows of real tokens.

    Args:
        x: (rows, ...), a padded batch with its sequences one after the other; of any dtype.
        indices: int64 (total_tokens,), ascending and each once, within [0, rows).
        backend: None follows `use_backend`; a name forces that backend for this call.

    Returns:
        (total_tokens, ...), the same bits. An index that is no row never reads or writes memory beyond `x`: torch's
        backend raises IndexError on a CPU, and asserts on a GPU; the kernels give a row of NaN, and no gradient for it.

    Raises:
        ValueError: tensors on two devices, or indices of another dtype or shape. BackendError: the backend that was
        asked for cannot serve the call.
    """
    check_devices("pack", x=x, indices=indices)
    if select("pack", backend, x) is Backend.TORCH:
        return _torch.pack(x, indices)
    _check_indices("pack", indices)
    matrix = _matrix(x)
    packed = _Pack.apply(matrix, indices) if needs_grad(x) else torch.ops.fastbert.pack_triton(matrix, indices)
    return packed.view(indices.shape[0], *x.shape[1:])


def unpack(packed: torch.Tensor, indices: torch.Tensor, num_rows: int, *, backend: str | None = None) -> torch.Tensor:
    """The inverse of `pack`: (total_tokens, ...) -> (num_rows, ...) with zeros in the rows that `indices` leaves out.

    `indices`, one for each row of `packed`, and what is raised are those of `pack`; the kernels leave a row out whose
    index is none of the `num_rows`, and its gradient is NaN. Every row is written once, where torch writes zeros and
    then the tokens over them.
    """
    check_devices("unpack", packed=packed, indices=indices)
    if select("unpack", backend, packed) is Backend.TORCH:
        return _torch.unpack(packed, indices, num_rows)
    _check_indices("unpack", indices)
    if indices.shape[0] != packed.shape[0]:
        raise ValueError(f"unpack: there are {indices.shape[0]} indices for {packed.shape[0]} tokens")
    matrix = _matrix(packed)
    if needs_grad(packed):
        padded = _Unpack.apply(matrix, indices, num_rows)
    else:
        padded = torch.ops.fastbert.unpack_triton(matrix, indices, num_rows)
    return padded.view(num_rows, *packed.shape[1:])
