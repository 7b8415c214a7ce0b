"""The gradient of attention that fused kernels compute for long texts, ours and torch's, as literal PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fastbert.backend import use_backend
from fastbert.ops.attention import torch_backend

LONGEST_SQUARE = 64  # of longer texts the kernels take delta from the output (docs/attention.md)


class _Weighted(torch.autograd.Function):
    """softmax(scores) v, whose backward has delta = rowsum(dO O) in the place of the sum of P dP."""

    @staticmethod
    def forward(ctx, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        probs = scores.softmax(-1)
        out = probs @ v
        ctx.save_for_backward(probs, v, out)
        return out

    @staticmethod
    def backward(ctx, dout: torch.Tensor):
        probs, v, out = ctx.saved_tensors
        delta = (dout.float() * out.float()).sum(-1, keepdim=True)
        dscores = probs.float() * ((dout @ v.mT).float() - delta)
        return dscores.to(probs.dtype), probs.mT @ dout


@contextmanager
def delta_of_the_output() -> Iterator[None]:
    """Within it models of ours run on PyTorch, and their attention has that gradient. Without dropout."""
    with pytest.MonkeyPatch.context() as patch, use_backend("torch"):
        patch.setattr(torch_backend, "_weighted", lambda scores, v, dropout_p: _Weighted.apply(scores, v))
        yield
