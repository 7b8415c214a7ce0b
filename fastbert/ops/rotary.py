"""Rotary position embedding, an option of attention (Su et al. 2021, section 3.4.2)."""

from __future__ import annotations

import torch

from fastbert.ops._common import at_least_fp32, define_triton, needs_grad
from fastbert.ops.packing import token_positions

Pair = tuple[torch.Tensor, torch.Tensor]

# q and k turned by their tokens' positions (cos and sin, fp32 (max_positions, head_dim // 2) by position, rows in one
# piece): both contiguous, zeros in slack rows. tiles and tile: as in attention.
rotary_triton = define_triton(
    "rotary",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor tiles, int tile) -> (Tensor q_rotated, Tensor k_rotated)",
    "rotary",
    lambda q, k, cos, sin, tiles, tile: (q.new_empty(q.shape), k.new_empty(k.shape)),
)


def check_rotary(q: torch.Tensor, rotary: Pair, max_seqlen: int) -> None:
    """Raises ValueError where (cos, sin) do not fit q (total_tokens, num_heads, head_dim) or max_seqlen."""
    head_dim = q.shape[-1]
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}: rotary embedding pairs one half of a head with the other")
    for name, t in zip(("cos", "sin"), rotary, strict=True):
        if t.dim() != 2 or t.shape[1] != head_dim // 2:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}, expected (max_positions, head_dim // 2 = {head_dim // 2})"
            )
        if t.dtype is not torch.float32:
            raise ValueError(f"{name} is {t.dtype}, expected torch.float32")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}, q on {q.device}")
        if needs_grad(t):
            raise ValueError(f"{name} requires a gradient, which attention does not give it; detach it")
        if t.shape[0] < max(1, max_seqlen):
            raise ValueError(f"{name} has {t.shape[0]} positions, max_seqlen is {max_seqlen}")
    cos, sin = rotary
    if cos.shape != sin.shape:
        raise ValueError(f"cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}")


def rotary_torch(x, cos, sin):
    """x (total_tokens, num_heads, head_dim), cos and sin (total_tokens, head_dim // 2), of each token's position."""
    x1, x2 = at_least_fp32(x).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)


def _positions(cu_seqlens: torch.Tensor, total_tokens: int, cache: dict | None) -> torch.Tensor:
    """The positions of a batch's tokens, made once for all layers."""
    positions = None if cache is None else cache.get("torch_positions")
    if positions is None:
        positions = token_positions(cu_seqlens, total_tokens)
        if cache is not None:
            cache["torch_positions"] = positions
    return positions


def rotate(q: torch.Tensor, k: torch.Tensor, rotary: Pair, cu_seqlens: torch.Tensor, cache: dict | None = None) -> Pair:
    """q and k (total_tokens, num_heads, head_dim), rotated by torch."""
    cos, sin = (t.index_select(0, _positions(cu_seqlens, q.shape[0], cache)) for t in rotary)
    return rotary_torch(q, cos, sin), rotary_torch(k, cos, sin)
