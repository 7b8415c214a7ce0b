"""What attention takes of the distance of two tokens beside rotary embedding: tables, and which row a distance has."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from fastbert import ops
from fastbert.layer_spec import AttentionSpec, Disentangled, LayerSpec, NormSpec, RelativeBias
from fastbert.layers.leaves import get_leaf, is_plain, linear, make_norm, place
from fastbert.layers.quantized import QuantizedLinear


def place_relative(root: nn.Module, form: AttentionSpec, norm: NormSpec, hidden_size: int) -> None:
    """The leaves below `root` that hold what layers with this attention share."""
    for path, shape in relative_shapes(form, hidden_size).items():
        place(root, path, nn.Embedding(*shape))
    if isinstance(form.position, Disentangled) and form.position.norm is not None:
        place(root, form.position.norm, make_norm(norm, hidden_size))


def relative_shapes(form: AttentionSpec, hidden_size: int) -> dict[str, tuple[int, int]]:
    """The path of the table that layers with this attention share, if there is one: its rows and columns."""
    position = form.relative
    if isinstance(position, RelativeBias):
        return {position.table: (position.num_rows, form.num_heads)}
    return {} if position is None else {position.table: (2 * position.span, hidden_size)}


class RelativeTable(NamedTuple):
    """What the layers of one forward pass share of a Disentangled or a RelativeBias.

    rows: int32 (2 * longest - 1,), as in ops.Relative. table: (num_rows, hidden_size), which layers project, or
    (num_rows, num_heads), the bias itself; in a model of Disentangled only the rows that the batch's distances reach.
    positions: int32 (total_tokens,), the columns of the padded batch; None: a token's place in its sequence.
    """

    rows: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor | None


def bias_rows(form: RelativeBias, longest: int) -> torch.Tensor:
    """The bucket of each distance from 1 - longest to longest - 1, as transformers' MPNet has it."""
    distance = torch.arange(1 - longest, longest)
    half = form.num_buckets // 2
    exact = half // 2
    away = distance.abs()
    growing = torch.log(away.float() / exact) / math.log(form.max_distance / exact) * (half - exact)
    far = (exact + growing.clamp(min=0).long()).clamp(max=half - 1)
    return ((distance < 0) * half + torch.where(away < exact, away, far)).int()


def disentangled_rows(form: Disentangled, longest: int) -> torch.Tensor:
    """The row of each distance from 1 - longest to longest - 1, as transformers' DeBERTa has it."""
    distance = torch.arange(1 - longest, longest)
    bucket = distance if form.buckets <= 0 or form.max_distance <= 0 else _log_buckets(form, distance)
    return (bucket + form.span).clamp(0, 2 * form.span - 1).int()


def _log_buckets(form: Disentangled, distance: torch.Tensor) -> torch.Tensor:
    """Distances of at most buckets / 2 as they are; beyond it, buckets that grow (He et al. 2021, "DeBERTaV3").

    In float32, by the operations of transformers: where a bucket ends is decided by their rounding.
    """
    mid = form.buckets // 2
    near = (distance < mid) & (distance > -mid)
    away = torch.where(near, torch.tensor(mid - 1), distance.abs())
    steps = torch.log(away / mid) / torch.log(torch.tensor((form.max_distance - 1) / mid)) * (mid - 1)
    far = torch.ceil(steps) + mid
    return torch.where(away <= mid, distance.to(far.dtype), far * distance.sign()).long()


# Rows by distance, made once and again where a text is longer. Only eager calls may ask here: see TreeCache.
_made: dict[tuple[RelativeBias | Disentangled, torch.device], torch.Tensor] = {}
_MOST_KINDS = 64


def _rows(form: RelativeBias | Disentangled, longest: int, device: torch.device) -> torch.Tensor:
    """int32 (2 * longest - 1,), on `device`."""
    if torch.compiler.is_compiling():
        return _rows_of(form, longest).to(device)
    found = _made.get((form, device))
    if found is None or found.shape[0] < 2 * longest - 1:
        with torch.inference_mode(False), torch.no_grad():
            found = _rows_of(form, 1 << max(longest - 1, 127).bit_length()).to(device)
        if len(_made) >= _MOST_KINDS:
            _made.clear()
        _made[form, device] = found
    extra = (found.shape[0] - (2 * longest - 1)) // 2
    return found[extra : found.shape[0] - extra]


def _rows_of(form: RelativeBias | Disentangled, longest: int) -> torch.Tensor:
    return bias_rows(form, longest) if isinstance(form, RelativeBias) else disentangled_rows(form, longest)


def relative_table(
    root: nn.Module,
    form: RelativeBias | Disentangled,
    longest: int,
    positions: torch.Tensor | None,
    device: torch.device,
) -> RelativeTable:
    """That of a forward pass over the leaves of `root`. positions: int32 (total_tokens,), columns; `longest`: no two
    places of a sequence are further apart.
    """
    rows = _rows(form, longest, device)
    table = _read_table(root, form.table)
    if isinstance(form, RelativeBias):
        return RelativeTable(rows, table, positions)
    first, last = 0, 2 * form.span  # distances rise, and so do their rows
    if not torch.compiler.is_compiling():
        first, last = _reached(form, longest)
        rows = rows - first if first else rows
        table = table[first:last]
    if form.norm is not None:
        norm = get_leaf(root, form.norm)
        table = norm(table)
    return RelativeTable(rows, table, positions)


def _reached(form: Disentangled, longest: int) -> tuple[int, int]:
    """The first row that a distance of less than `longest` has, and the one behind the last."""
    ends = disentangled_rows(form, longest)
    return int(ends[0]), int(ends[-1]) + 1


def _read_table(root: nn.Module, path: str) -> torch.Tensor:
    """The weights of an Embedding that is read as a whole, as transformers reads it: no call, and no hooks."""
    weight = get_leaf(root, path).weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _projected(leaf: nn.Module, table: torch.Tensor) -> torch.Tensor:
    """The table (num_rows, hidden_size) through a projection, in floating point where that is in int8, too: few rows
    that all tokens share.
    """
    if is_plain(leaf, QuantizedLinear):
        return leaf.in_floating_point(table)
    return linear(leaf, table)


def relative_of(layer: nn.Module, spec: LayerSpec, shared: RelativeTable, dtype: torch.dtype) -> ops.Relative | None:
    """What attention takes in one layer: the projections of the table, in `dtype`, or the bias itself."""
    form = spec.attention
    rows, table, positions = shared
    if isinstance(form.position, RelativeBias):
        return ops.Relative(rows, bias=table, positions=positions)
    assert isinstance(form.position, Disentangled)
    if layer.training:
        table = ops.dropout(table, form.relative_dropout)
    projected: list[torch.Tensor | None] = []
    for path in (spec.names.relative_key, spec.names.relative_query):
        made = None if path is None else _projected(get_leaf(layer, path), table)
        projected.append(None if made is None else made.unflatten(-1, (form.num_heads, form.head_dim)).to(dtype))
    if projected == [None, None]:  # transformers has the table then, too, and reads it in vain
        return None
    key, query = projected
    return ops.Relative(rows, key, query, positions=positions)
