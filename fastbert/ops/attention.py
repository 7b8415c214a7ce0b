"""Bidirectional varlen attention over packed sequences (Vaswani et al. 2017, section 3.2.1, eq. 1)."""

from __future__ import annotations

import torch

from fastbert.backend import declare, select
from fastbert.ops import _torch

declare("attention")


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    cache: dict | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """softmax(q k^T * softmax_scale) v within each sequence; softmax in fp32.

    Args:
        q, k, v: (total_tokens, num_heads, head_dim).
        cu_seqlens: int32 (batch + 1,), the offsets of the sequences; rows beyond cu_seqlens[-1] are slack.
        max_seqlen: an upper bound of the sequence lengths, known on the host.
        softmax_scale: default 1 / sqrt(head_dim).
        dropout_p: probability of dropping an attention probability after the softmax.
        cache: a dict that lives as long as the batch; a backend keeps there what it derives from cu_seqlens, so that
            the layers of one forward pass derive it once.
        backend: None follows `use_backend`; a name forces that backend for this call.

    Returns:
        (total_tokens, num_heads, head_dim); zeros in slack rows. No sequence sees another, bit for bit.
    """
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    select("attention", backend, q, k, v)
    return _torch.attention(q, k, v, cu_seqlens, max_seqlen, softmax_scale, dropout_p, cache)


def attention_probs(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """The probabilities that `attention` never writes down, for `output_attentions=True`; before dropout.

    Returns (batch, num_heads, max_seqlen, max_seqlen); zeros at query and key slots beyond a sequence's length.
    """
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    return _torch.attention_probs(q, k, cu_seqlens, max_seqlen, softmax_scale)
