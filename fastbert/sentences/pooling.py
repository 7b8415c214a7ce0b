"""From packed hidden states to one vector a text: sentence-transformers' pooling modes, with or without the prompt."""

from __future__ import annotations

import torch

from fastbert import ops
from fastbert.ops.packing import token_positions


def pool(
    hidden: torch.Tensor, cu_seqlens: torch.Tensor, modes: tuple[str, ...], prompt_tokens: int = 0
) -> torch.Tensor:
    """(total_tokens, hidden_size) -> (sequences, hidden_size * number of modes).

    `prompt_tokens`: so many at the beginning of every sequence are left out. "weightedmean" still counts them, and a
    sequence that has no others gives zeros.
    """
    if prompt_tokens:
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        hidden = hidden[token_positions(cu_seqlens, hidden.shape[0]) >= prompt_tokens]
        cu_seqlens = torch.nn.functional.pad((lengths - prompt_tokens).clamp(min=0).cumsum(0), (1, 0)).int()
    return torch.cat([_pool(hidden, cu_seqlens, mode, prompt_tokens) for mode in modes], dim=-1)


def _pool(hidden: torch.Tensor, cu_seqlens: torch.Tensor, mode: str, prompt_tokens: int) -> torch.Tensor:
    if mode in ("mean", "cls", "max"):
        return ops.pooling(hidden, cu_seqlens, mode=mode)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    if mode == "mean_sqrt_len_tokens":
        return ops.pooling(hidden, cu_seqlens, mode="mean") * lengths[:, None].sqrt()
    if mode == "lasttoken":
        last = (
            hidden[(cu_seqlens[1:].long() - 1).clamp(min=0)] if hidden.shape[0] else hidden.new_zeros(len(lengths), 1)
        )
        return torch.where(lengths[:, None] > 0, last, 0.0)
    # weightedmean: the weight of a token is its place, which counts from 1 (Muennighoff 2022, section 3).
    position = token_positions(cu_seqlens, hidden.shape[0]) + 1 + prompt_tokens
    weighted = ops.at_least_fp32(hidden) * position[:, None]
    # The weights' mean: they run from prompt_tokens + 1 to prompt_tokens + length.
    mean_weight = prompt_tokens + (lengths + 1)[:, None] / 2
    return (ops.pooling(weighted, cu_seqlens, mode="mean") / mean_weight).to(hidden.dtype)
