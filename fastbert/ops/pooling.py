"""pooling: one vector a sequence, straight from packed tokens (Reimers & Gurevych 2019, section 3)."""

from __future__ import annotations

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops import _torch
from fastbert.ops._checks import check_devices, int32_offsets
from fastbert.ops._library import needs_grad, triton_objection

MODES = ("mean", "cls", "max")


def _supports_triton(x, cu_seqlens) -> str | None:
    if x.dim() != 2:
        return f"hidden_states has {x.dim()} dimensions, the kernels take (total_tokens, hidden_size)"
    return triton_objection(x)


register("pooling", Backend.TRITON, _supports_triton, probe=lambda x, vector: (x, vector))


class _Pooling(torch.autograd.Function):
    """A maximum's gradient is shared evenly by the tokens that have it, as torch's is."""

    @staticmethod
    def forward(ctx, hidden_states, cu_seqlens, mode):
        is_max = mode == "max"
        out, ties = torch.ops.fastbert.pooling_fwd_triton(hidden_states, cu_seqlens, mode, is_max)
        ctx.save_for_backward(cu_seqlens, *((hidden_states, out, ties) if is_max else (None, None, None)))
        ctx.options = (mode, hidden_states.shape[0])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        cu_seqlens, *of_max = ctx.saved_tensors
        return torch.ops.fastbert.pooling_bwd_triton(dout, *of_max, cu_seqlens, *ctx.options), None, None


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
    if select("pooling", backend, hidden_states, cu_seqlens) is Backend.TORCH:
        return _torch.pooling(hidden_states, cu_seqlens, mode)
    if needs_grad(hidden_states):
        return _Pooling.apply(hidden_states, cu_seqlens, mode)
    return torch.ops.fastbert.pooling_fwd_triton(hidden_states, cu_seqlens, mode, False)[0]
