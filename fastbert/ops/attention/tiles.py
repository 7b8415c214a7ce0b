"""The tiles of a batch, which the programs of Triton's attention kernels take: a list on the device, without a wait."""

from __future__ import annotations

import torch

from fastbert.ops._common import define_triton

# int32 (num_tiles, 4): tiles of up to `tile` tokens of a sequence each, the longest sequences' first.
_MAKE_TILES = define_triton(
    "attention_tiles",
    "(Tensor cu_seqlens, SymInt total_tokens, int tile) -> Tensor",
    "attention",
    lambda cu_seqlens, total_tokens, tile: cu_seqlens.new_empty(total_tokens // tile + cu_seqlens.numel(), 4),
)


def tiles_of(cu_seqlens: torch.Tensor, total_tokens: int, tile: int, cache: dict | None) -> torch.Tensor:
    """The list of tiles of a batch, made once for all layers."""
    tiles = None if cache is None else cache.get(("triton_tiles", tile))
    if tiles is None:
        tiles = _MAKE_TILES(cu_seqlens, total_tokens, tile)
        if cache is not None:
            cache["triton_tiles", tile] = tiles
    return tiles
