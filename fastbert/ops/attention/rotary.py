"""Rotary position embedding, an option of attention (Su et al. 2021, section 3.4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastbert.ops._common import at_least_fp32, define_triton, needs_grad
from fastbert.ops.packing import token_positions


class Rotary(NamedTuple):
    """The tables that attention rotates q and k by: fp32, (rows, head_dim // 2)."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False  # dimension 2 i with 2 i + 1 (RoFormer), else i with head_dim // 2 + i (GPT-NeoX)
    by_token: bool = False  # row t belongs to token t of the packed batch, else row p to position p of a sequence


# q and k rotated by their tokens' positions (cos and sin, fp32 (rows, head_dim // 2), rows in one piece): both
# contiguous, zeros in padding rows. tiles and tile: as in attention; the rest: as in Rotary.
rotary_triton = define_triton(
    "rotary",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor tiles, int tile, bool interleaved=False, bool by_token=False)"
    " -> (Tensor q_rotated, Tensor k_rotated)",
    "rotary",
    lambda q, k, *others: (q.new_empty(q.shape), k.new_empty(k.shape)),
)


def check_rotary(q: torch.Tensor, rotary: Rotary, max_seqlen: int) -> None:
    """Raises ValueError where the tables do not fit q (total_tokens, num_heads, head_dim) or max_seqlen."""
    total_tokens, head_dim = q.shape[0], q.shape[-1]
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}: rotary embedding takes the dimensions of a head in pairs")
    for name, t in (("cos", rotary.cos), ("sin", rotary.sin)):
        if t.dim() != 2 or t.shape[1] != head_dim // 2:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, expected (rows, head_dim // 2 = {head_dim // 2})")
        if t.dtype is not torch.float32:
            raise ValueError(f"{name} is {t.dtype}, expected torch.float32")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}, q on {q.device}")
        if needs_grad(t):
            raise ValueError(f"{name} requires a gradient, which attention does not give it; detach it")
        if rotary.by_token and t.shape[0] != total_tokens:
            raise ValueError(f"{name} has {t.shape[0]} rows, one a token, but there are {total_tokens} tokens")
        if not rotary.by_token and t.shape[0] < max(1, max_seqlen):
            raise ValueError(f"{name} has {t.shape[0]} positions, max_seqlen is {max_seqlen}")
    if rotary.cos.shape != rotary.sin.shape:
        raise ValueError(f"cos has shape {tuple(rotary.cos.shape)}, sin {tuple(rotary.sin.shape)}")


def rotary_torch(x, cos, sin, interleaved=False):
    """x (total_tokens, num_heads, head_dim), cos and sin (total_tokens, head_dim // 2), of each token."""
    x1, x2 = at_least_fp32(x).unflatten(-1, (-1, 2)).unbind(-1) if interleaved else at_least_fp32(x).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    return (torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)).to(x.dtype)


def _positions(cu_seqlens: torch.Tensor, total_tokens: int, cache: dict | None) -> torch.Tensor:
    """The positions of a batch's tokens, made once for all layers."""
    positions = None if cache is None else cache.get("torch_positions")
    if positions is None:
        positions = token_positions(cu_seqlens, total_tokens)
        if cache is not None:
            cache["torch_positions"] = positions
    return positions


def rotate(
    tensors: Sequence[torch.Tensor], rotary: Rotary, cu_seqlens: torch.Tensor, cache: dict | None = None
) -> list[torch.Tensor]:
    """Queries, keys or values, (total_tokens, their heads, head_dim) each, rotated by torch.

    Tables narrower than head_dim // 2 rotate the first dimensions of each head (GPT-NeoX; Black et al. 2022, 2.1.1).
    """
    cos, sin = rotary.cos, rotary.sin
    if not rotary.by_token:
        positions = _positions(cu_seqlens, tensors[0].shape[0], cache)
        cos, sin = cos.index_select(0, positions), sin.index_select(0, positions)
    width = 2 * cos.shape[1]
    rotated = [rotary_torch(t[..., :width], cos, sin, rotary.interleaved) for t in tensors]
    return [
        part if width == t.shape[-1] else torch.cat((part, t[..., width:]), -1)
        for part, t in zip(rotated, tensors, strict=True)
    ]
