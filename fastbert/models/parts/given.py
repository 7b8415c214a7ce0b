"""Tables of distances that a user gives to a layer, in the forms in which transformers' layers take them."""

from __future__ import annotations

from typing import Any

import torch

from fastbert import ops
from fastbert.errors import InputError
from fastbert.layer_spec import Disentangled, LayerSpec, RotarySpec
from fastbert.layers.relative import RelativeTable, rows_by_distance
from fastbert.packing import PackedBatch


def name_of_given(spec: LayerSpec) -> str | None:
    """What transformers' layers call such a table; None: these have none."""
    position = spec.attention.position
    if isinstance(position, RotarySpec):
        return "position_embeddings" if position.table is None else "sinusoidal_pos"
    return None if position is None else "rel_embeddings" if isinstance(position, Disentangled) else "position_bias"


def given_rotary(rotary: RotarySpec, given: Any, batch: PackedBatch) -> ops.Rotary:
    """Of (cosines, sines), (batch or 1, columns, dim) each; or of sines and then cosines, (..., columns, dim), as a
    table has them that is saved.
    """
    if rotary.table is not None:
        sin, cos = (half.flatten(0, -3) if half.dim() > 2 else half[None] for half in given.chunk(2, -1))
    else:
        halves = (t[..., ::2] if rotary.interleaved else t[..., : rotary.dim // 2] for t in given)
        cos, sin = (t if t.dim() == 3 else t[None] for t in halves)
    if cos.shape[-1] != rotary.dim // 2:
        found = 2 * cos.shape[-1]
        raise InputError(f"the tables of rotary embedding have {found} columns; they must have {rotary.dim}")
    rows = [_by_token(t.float(), batch) for t in (cos, sin)]
    return ops.Rotary(rows[0], rows[1], rotary.interleaved, by_token=True)


def _by_token(t: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """(batch or 1, columns, dim), or (1, total_tokens, dim) of a packed batch -> (total_tokens, dim)."""
    if batch.seqlen is None:
        return t.flatten(0, 1).contiguous()
    return batch.pack(t.expand(batch.batch_size, -1, -1).contiguous())


def given_table(
    spec: Disentangled, given: torch.Tensor, relative_pos: torch.Tensor | None, batch: PackedBatch
) -> RelativeTable:
    """Of (2 * span, hidden_size). relative_pos: where transformers reads it, (..., columns, columns), or None."""
    columns = batch.columns_with_gaps()
    longest = max(1, batch.max_seqlen if columns is None or batch.seqlen is None else batch.seqlen)
    longest = longest if relative_pos is None else max(longest, relative_pos.shape[-1])
    rows = rows_by_distance(spec, longest, given.device)
    if relative_pos is not None:
        shown = (relative_pos + spec.span).clamp(0, 2 * spec.span - 1)
        if not (rows[_distances(relative_pos.shape[-1], rows)] == shown).all():
            raise InputError("relative_pos is another than the model's own: leave it out")
    return RelativeTable(rows, None if columns is None else columns.int(), given[: 2 * spec.span])


def given_bias(given: torch.Tensor, batch: PackedBatch) -> RelativeTable:
    """Of the bias itself, (batch or 1, num_heads, columns, columns)."""
    columns, longest = batch.columns_with_gaps(), given.shape[-1]
    # A row for each distance: that of the first row backwards, then of its column downwards.
    table = torch.cat((given[0, :, 0, 1:].flip(-1), given[0, :, :, 0]), -1).t()
    rows = torch.arange(2 * longest - 1, dtype=torch.int32, device=given.device)
    if not torch.equal(table[_distances(longest, rows)].permute(2, 0, 1).expand(given.shape), given):
        raise InputError("position_bias does not go by the distance of two columns alone, as the model's own does")
    return RelativeTable(rows, None if columns is None else columns.int(), table)


def _distances(size: int, rows: torch.Tensor) -> torch.Tensor:
    """(size, size): where `rows`, by distance, have that of a query and a key."""
    places = torch.arange(size, device=rows.device)
    return places[:, None] - places + rows.shape[0] // 2
