"""What all layers of one forward pass share, made once, by the encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastbert import ops
from fastbert.layer_spec import Disentangled, Distances, RelativeBias, RotarySpec
from fastbert.layers.relative import RelativeTable, relative_table
from fastbert.layers.rotary import rotary_tables

if TYPE_CHECKING:
    from fastbert.packing import PackedBatch


@dataclass(frozen=True)
class LayerContext:
    """batch: where the sequences are.

    window_positions: int32 (total_tokens,), by which windows measure distances; None: a token's place in its sequence.
    rotary: the tables of each kind of rotary embedding that the layers have; relative: those of each kind of relative
    attention. show_probs: of attention probabilities, what the caller gets, and what the layer goes on with; None: they
    themselves.
    """

    batch: PackedBatch
    window_positions: torch.Tensor | None = None
    rotary: Mapping[RotarySpec, ops.Rotary] = field(default_factory=dict)
    relative: Mapping[RelativeBias | Disentangled, RelativeTable] = field(default_factory=dict)
    show_probs: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None


def make_context(
    root: nn.Module,
    distances: Distances | None,
    batch: PackedBatch,
    rotary_positions: torch.Tensor | None,
    window_positions: torch.Tensor | None,
) -> LayerContext:
    """The context of layers below `root`. The positions are int64 (total_tokens,), or None for a token's place in its
    sequence.
    """
    if distances is None:
        return LayerContext(batch)
    rotaries, has_windows, relatives = distances
    device = batch.cu_seqlens.device
    tables = {each: rotary_tables(root, each, rotary_positions, batch.max_seqlen, device) for each in rotaries}
    columns = None if window_positions is None else window_positions.int()
    longest = batch.max_seqlen if columns is None or batch.seqlen is None else batch.seqlen
    terms = {each: relative_table(root, each, max(1, longest), columns, device) for each in relatives}
    return LayerContext(batch, columns if has_windows else None, tables, terms)
