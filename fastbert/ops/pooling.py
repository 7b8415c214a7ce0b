"""pooling: one vector a sequence, straight from packed tokens (Reimers & Gurevych 2019, section 3)."""

from __future__ import annotations

import math

import torch

from fastbert.backend import Backend, register, select
from fastbert.native.availability import extension_error
from fastbert.ops._common import (
    at_least_fp32,
    check_devices,
    define,
    define_triton,
    differentiable_once,
    needs_grad,
    triton_unsupported,
)
from fastbert.ops.packing import check_offsets_on_cpu, int32_offsets, sequence_sums, token_sequences

MODES = ("mean", "cls", "max")


# x (total_tokens, hidden_size) -> out (batch, hidden_size). ties: int32, as out: how many tokens have a maximum; no
# rows unless return_ties. Backward reads x, out and ties for "max" only.


def _fwd_fake(x, cu_seqlens, mode, return_ties):
    batch_size = cu_seqlens.shape[0] - 1
    ties = x.new_empty(batch_size if return_ties else 0, x.shape[1], dtype=torch.int32)
    return x.new_empty(batch_size, x.shape[1]), ties


_FWD_SCHEMA = "(Tensor x, Tensor cu_seqlens, str mode, bool return_ties) -> (Tensor out, Tensor ties)"
_BWD_SCHEMA = (
    "(Tensor dout, Tensor? x, Tensor? out, Tensor? ties, Tensor cu_seqlens, str mode, SymInt total_tokens) -> Tensor"
)


def _bwd_fake(dout, x, out, ties, cu_seqlens, mode, total_tokens):
    return dout.new_empty(total_tokens, dout.shape[1])


_FWD = {
    Backend.CPU: define("pooling_fwd_cpu", _FWD_SCHEMA, _fwd_fake),
    Backend.TRITON: define_triton("pooling_fwd", _FWD_SCHEMA, "pooling", _fwd_fake),
}
_BWD = {
    Backend.CPU: define("pooling_bwd_cpu", _BWD_SCHEMA, _bwd_fake),
    Backend.TRITON: define_triton("pooling_bwd", _BWD_SCHEMA, "pooling", _bwd_fake),
}


def _pooling_torch(hidden_states, cu_seqlens, mode):
    total_tokens, hidden_size = hidden_states.shape
    check_offsets_on_cpu("pooling", cu_seqlens, total_tokens)
    batch_size = cu_seqlens.shape[0] - 1
    pooled = hidden_states.new_zeros(batch_size, hidden_size)
    if total_tokens == 0:
        return pooled + hidden_states.sum()  # keeps the graph: gradients are defined, and zero
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1])[:, None]
    if mode == "cls":
        first = cu_seqlens[:-1].long().clamp(max=total_tokens - 1)
        return torch.where(lengths > 0, hidden_states.index_select(0, first), 0.0)
    sequence, inside = token_sequences(cu_seqlens, total_tokens)
    if mode == "mean":
        real = torch.where(inside[:, None], at_least_fp32(hidden_states), 0.0)
        return (sequence_sums(real, sequence, batch_size) / lengths.clamp(min=1)).to(hidden_states.dtype)
    real = torch.where(inside[:, None], hidden_states, -math.inf)
    index = sequence[:, None].expand_as(hidden_states)
    # Not from zeros: scatter_reduce's backward shares the gradient with what it starts from, where that is the maximum.
    pooled = torch.full_like(pooled, -math.inf).scatter_reduce(0, index, real, "amax", include_self=False)
    return torch.where(lengths > 0, pooled, 0.0)


def _supports_cpu(x, cu_seqlens) -> str | None:
    if not x.is_cpu:
        return f"tensors are on {x.device.type}"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {x.dtype} (has float32 and bfloat16)"
    return _shape_unsupported(x) or extension_error()


def _supports_triton(x, cu_seqlens) -> str | None:
    return _shape_unsupported(x) or triton_unsupported(x)


def _shape_unsupported(x) -> str | None:
    if x.dim() != 2:
        return f"hidden_states has {x.dim()} dimensions, the kernels take (total_tokens, hidden_size)"
    return None


def _probe(x, vector):
    return x, vector


register("pooling", Backend.CPU, _supports_cpu, _probe)
register("pooling", Backend.TRITON, _supports_triton, _probe)


class _Pooling(torch.autograd.Function):
    """A maximum's gradient is shared evenly by the tokens that have it, as torch's is.

    Not `Differentiable`: backward needs a size that no saved tensor has (see `pack`).
    """

    @staticmethod
    def forward(ctx, backend, hidden_states, cu_seqlens, mode):
        is_max = mode == "max"
        out, ties = _FWD[backend](hidden_states, cu_seqlens, mode, is_max)
        ctx.save_for_backward(cu_seqlens, *((hidden_states, out, ties) if is_max else (None, None, None)))
        ctx.backend, ctx.options = backend, (mode, hidden_states.shape[0])
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, dout):
        cu_seqlens, *of_max = ctx.saved_tensors
        return None, _BWD[ctx.backend](dout, *of_max, cu_seqlens, *ctx.options), None, None


def pooling(
    hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, *, mode: str = "mean", backend: str | None = None
) -> torch.Tensor:
    """Mean, first token ("cls") or maximum of each sequence's tokens.

    hidden_states (total_tokens, hidden_size), cu_seqlens int32 (batch + 1,) -> (batch, hidden_size). A sequence without
    tokens gives zeros. Sums run in fp32. An int64 cu_seqlens is converted.

    Raises ValueError for an unknown mode, tensors on two devices, a cu_seqlens of another dtype or shape, or, on a CPU,
    offsets that do not fit the tokens;
    BackendError where the backend that was asked for cannot serve the call.
    """
    if mode not in MODES:
        raise ValueError(f"unknown pooling mode {mode!r}; valid modes: {', '.join(MODES)}")
    check_devices("pooling", hidden_states=hidden_states, cu_seqlens=cu_seqlens)
    cu_seqlens = int32_offsets("pooling", cu_seqlens)
    chosen = select("pooling", backend, hidden_states, cu_seqlens)
    if chosen is Backend.TORCH:
        return _pooling_torch(hidden_states, cu_seqlens, mode)
    if needs_grad(hidden_states):
        return _Pooling.apply(chosen, hidden_states, cu_seqlens, mode)
    return _FWD[chosen](hidden_states, cu_seqlens, mode, False)[0]
