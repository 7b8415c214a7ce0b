"""pooling: one vector a sequence, straight from packed tokens (Reimers & Gurevych 2019, section 3)."""

from __future__ import annotations

import torch

from fastbert.backend import declare, select
from fastbert.ops import _torch

declare("pooling")

MODES = ("mean", "cls", "max")


def pooling(
    hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, *, mode: str = "mean", backend: str | None = None
) -> torch.Tensor:
    """Mean, first token ("cls") or maximum of each sequence's tokens.

    hidden_states (total_tokens, hidden_size), cu_seqlens int32 (batch + 1,) -> (batch, hidden_size). A sequence without
    tokens gives zeros. Sums run in fp32. Raises ValueError for an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"unknown pooling mode {mode!r}; valid modes: {', '.join(MODES)}")
    select("pooling", backend, hidden_states, cu_seqlens)
    return _torch.pooling(hidden_states, cu_seqlens, mode)
