"""The tiles of a batch, which the programs of Triton's attention kernels take: a list on the device, without a wait."""

from __future__ import annotations

import torch

from fastbert.ops._common import define_triton

# int32 (num_tiles, 8): tiles of up to `tile` tokens of a sequence each, the longest sequences' first. With num_keys,
# int32 (batch,), those that are no keys are in tiles of their own.
_MAKE_TILES = define_triton(
    "attention_tiles",
    "(Tensor cu_seqlens, SymInt total_tokens, int tile, Tensor? num_keys=None) -> Tensor",
    "attention",
    lambda cu_seqlens, total_tokens, tile, num_keys=None: cu_seqlens.new_empty(
        total_tokens // tile + cu_seqlens.numel() + (0 if num_keys is None else num_keys.numel()), 8
    ),
)


def tiles_of(
    cu_seqlens: torch.Tensor, total_tokens: int, tile: int, cache: dict | None, num_keys: torch.Tensor | None = None
) -> torch.Tensor:
    """The list of tiles of a batch, made once for all layers."""
    tiles = None if cache is None else cache.get(("triton_tiles", tile))
    if tiles is None:
        tiles = _MAKE_TILES(cu_seqlens, total_tokens, tile, num_keys)
        if cache is not None:
            cache["triton_tiles", tile] = tiles
    return tiles
