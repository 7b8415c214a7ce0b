"""What attention takes of the distance of two tokens beside rotary embedding: tables, and which row a distance has."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import nn

from fastbert import ops
from fastbert.layer_spec import AttentionSpec, Disentangled, LayerSpec, NormSpec, RelativeBias
from fastbert.layers.guard import Kept
from fastbert.layers.leaves import get_leaf, is_linear, is_plain, linear, set_module
from fastbert.layers.norms import make_norm
from fastbert.layers.quantized import QuantizedLinear


def place_relative(root: nn.Module, attention: AttentionSpec, norm: NormSpec, hidden_size: int) -> None:
    """The leaves below `root` that hold what layers with this attention share."""
    for path, shape in relative_shapes(attention, hidden_size).items():
        set_module(root, path, nn.Embedding(*shape))
    if isinstance(attention.position, Disentangled) and attention.position.norm is not None:
        set_module(root, attention.position.norm, make_norm(norm, hidden_size))


def relative_shapes(attention: AttentionSpec, hidden_size: int) -> dict[str, tuple[int, int]]:
    """The path of the table that layers with this attention share, if there is one: its rows and columns."""
    position = attention.relative
    if isinstance(position, RelativeBias):
        return {position.table: (position.num_rows, attention.num_heads)}
    return {} if position is None else {position.table: (2 * position.span, hidden_size)}


class RelativeTable(NamedTuple):
    """What the layers of one forward pass share of a Disentangled or a RelativeBias.

    rows: int32 (2 * longest - 1,), as in ops.Relative, counted from the first row that the batch's distances reach.
    positions: int32 (total_tokens,), the columns of the padded batch; None: a token's place in its sequence. table:
    (num_rows, hidden_size), which layers project, or (num_rows, num_heads), the bias itself. Of Disentangled it has the
    rows that are reached, normed; in inference mode, where layers keep their projections, all of them as they are, with
    which are `reached`, their `norm`, and the tensors that all of this is made of.
    """

    rows: torch.Tensor
    positions: torch.Tensor | None
    table: torch.Tensor
    reached: slice | None = None
    norm: nn.Module | None = None
    sources: Sequence[torch.Tensor] = ()


def bias_rows(spec: RelativeBias, longest: int) -> torch.Tensor:
    """The bucket of each distance from 1 - longest to longest - 1, as transformers' MPNet has it."""
    distance = torch.arange(1 - longest, longest)
    half = spec.num_buckets // 2
    exact = half // 2
    away = distance.abs()
    growing = torch.log(away.float() / exact) / math.log(spec.max_distance / exact) * (half - exact)
    far = (exact + growing.clamp(min=0).long()).clamp(max=half - 1)
    return ((distance < 0) * half + torch.where(away < exact, away, far)).int()


def disentangled_rows(spec: Disentangled, longest: int) -> torch.Tensor:
    """The row of each distance from 1 - longest to longest - 1, as transformers' DeBERTa has it."""
    distance = torch.arange(1 - longest, longest)
    bucket = distance if spec.buckets <= 0 or spec.max_distance <= 0 else _log_buckets(spec, distance)
    return (bucket + spec.span).clamp(0, 2 * spec.span - 1).int()


def _log_buckets(spec: Disentangled, distance: torch.Tensor) -> torch.Tensor:
    """Distances of at most buckets / 2 as they are; beyond it, buckets that grow (He et al. 2021, "DeBERTaV3").

    In float32, by the operations of transformers: where a bucket ends is decided by their rounding.
    """
    mid = spec.buckets // 2
    near = (distance < mid) & (distance > -mid)
    away = torch.where(near, torch.tensor(mid - 1), distance.abs())
    steps = torch.log(away / mid) / torch.log(torch.tensor((spec.max_distance - 1) / mid)) * (mid - 1)
    far = torch.ceil(steps) + mid
    return torch.where(away <= mid, distance.to(far.dtype), far * distance.sign()).long()


# Rows by distance, made once and again where a text is longer. Only eager calls may ask here: see TreeCache.
_row_cache: dict[tuple[RelativeBias | Disentangled, torch.device], torch.Tensor] = {}
_MOST_KINDS = 64


def rows_by_distance(spec: RelativeBias | Disentangled, longest: int, device: torch.device) -> torch.Tensor:
    """int32 (2 * longest - 1,), on `device`: `RelativeTable.rows`, counted from the first row of all."""
    if torch.compiler.is_compiling():
        return _rows_of(spec, longest).to(device)
    rows = _row_cache.get((spec, device))
    if rows is None or rows.shape[0] < 2 * longest - 1:
        with torch.inference_mode(False), torch.no_grad():
            rows = _rows_of(spec, 1 << max(longest - 1, 127).bit_length()).to(device)
        if len(_row_cache) >= _MOST_KINDS:
            _row_cache.clear()
        _row_cache[spec, device] = rows
    extra = (rows.shape[0] - (2 * longest - 1)) // 2
    return rows[extra : rows.shape[0] - extra]


def _rows_of(spec: RelativeBias | Disentangled, longest: int) -> torch.Tensor:
    return bias_rows(spec, longest) if isinstance(spec, RelativeBias) else disentangled_rows(spec, longest)


@functools.cache
def _reached(spec: Disentangled, longest: int) -> tuple[int, int]:
    """The first row that a distance of less than `longest` has, and the one behind the last: distances rise, and so do
    their rows.
    """
    ends = disentangled_rows(spec, longest)
    return int(ends[0]), int(ends[-1]) + 1


def relative_table(
    root: nn.Module,
    spec: RelativeBias | Disentangled,
    longest: int,
    positions: torch.Tensor | None,
    device: torch.device,
) -> RelativeTable:
    """That of a forward pass over the leaves of `root`. positions: int32 (total_tokens,), columns; `longest`: no two
    places of a sequence are further apart.
    """
    rows = rows_by_distance(spec, longest, device)
    if isinstance(spec, RelativeBias):
        return RelativeTable(rows, positions, _bias_of_buckets(root, spec))
    table = _read_table(root, spec.table)
    norm = None if spec.norm is None else get_leaf(root, spec.norm)
    first, last = 0, 2 * spec.span
    if not torch.compiler.is_compiling():
        first, last = _reached(spec, longest)
        rows = rows - first if first else rows
    if not torch.is_inference_mode_enabled() or torch.compiler.is_compiling():
        table = table[first:last]
        return RelativeTable(rows, positions, table if norm is None else norm(table))
    held = [table] if norm is None else [table, *_tensors_of(norm)]
    return RelativeTable(rows, positions, table, slice(first, last), norm, held)


def _bias_of_buckets(root: nn.Module, spec: RelativeBias) -> torch.Tensor:
    """All rows of an Embedding that transformers calls: LoRA takes part, and a hook that makes its weight."""
    weight, leaf = _read_table(root, spec.table), get_leaf(root, spec.table)
    return weight if is_plain(leaf, nn.Embedding) else leaf(torch.arange(len(weight), device=weight.device))


def _read_table(root: nn.Module, path: str) -> torch.Tensor:
    """The weights of an Embedding that is read as a whole, as transformers reads it: no call, and no hooks."""
    weight = get_leaf(root, path).weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    own = (*module._parameters.values(), *module._buffers.values())
    return [t for t in own if t is not None]


class Projections(Kept):
    """What a layer's projections make of the whole table, kept in the layer between calls in inference mode.

    They are made anew where a tensor that they were made of is another one or has been written to, and after 1,024
    calls, since not every write is counted (docs/gemm.md).
    """

    __slots__ = ("calls_left", "dtype", "projected", "sources", "versions")

    def __init__(self) -> None:
        self.calls_left = 0

    def serves(self, sources: list[torch.Tensor], dtype: torch.dtype) -> bool:
        self.calls_left -= 1
        return (
            self.calls_left > 0
            and self.dtype is dtype
            and len(sources) == len(self.sources)
            and all(map(is_, sources, self.sources))
            and [t._version for t in sources] == self.versions
        )

    def keep(
        self,
        sources: list[torch.Tensor],
        dtype: torch.dtype,
        projected: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> None:
        self.sources, self.dtype, self.projected = sources, dtype, projected
        self.versions = [t._version for t in sources]
        self.calls_left = 1024


_KEPT = "_fastbert_projections"


def _projected(leaf: nn.Module, table: torch.Tensor) -> torch.Tensor:
    """The table (num_rows, hidden_size) through a projection, in floating point where that is in int8, too: few rows
    that all tokens share.
    """
    if is_plain(leaf, QuantizedLinear):
        return leaf.in_floating_point(table)
    return linear(leaf, table)


def relative_of(layer: nn.Module, spec: LayerSpec, shared: RelativeTable, dtype: torch.dtype) -> ops.Relative | None:
    """What attention takes in one layer: the projections of the table, in `dtype`, or the bias itself."""
    attention, names = spec.attention, spec.names
    if isinstance(attention.position, RelativeBias):
        return ops.Relative(shared.rows, bias=shared.table, positions=shared.positions)
    paths = (names.relative_key, names.relative_query)
    if paths == (None, None):  # transformers has the table then, too, and reads it in vain
        return None

    def project(path: str | None, table: torch.Tensor) -> torch.Tensor | None:
        if path is None:
            return None
        return (
            _projected(get_leaf(layer, path), table).unflatten(-1, (attention.num_heads, attention.head_dim)).to(dtype)
        )

    if shared.reached is None:
        table = ops.dropout(shared.table, attention.relative_dropout) if layer.training else shared.table
        key, query = (project(path, table) for path in paths)
        return ops.Relative(shared.rows, key, query, positions=shared.positions)
    leaves = [get_leaf(layer, path) for path in paths if path is not None]
    sources = [*shared.sources, *(t for leaf in leaves for t in _tensors_of(leaf))]
    can_keep = not layer.training and all(map(is_linear, leaves)) and not any(t.is_inference() for t in sources)
    kept = layer.__dict__.setdefault(_KEPT, Projections()) if can_keep else Projections()
    if not can_keep or not kept.serves(sources, dtype):
        table = shared.table if shared.norm is None else shared.norm(shared.table)
        table = ops.dropout(table, attention.relative_dropout) if layer.training else table
        projected = (project(paths[0], table), project(paths[1], table))
        if can_keep:
            kept.keep(sources, dtype, projected)
    else:
        projected = kept.projected
    key, query = (None if t is None else t[shared.reached] for t in projected)
    return ops.Relative(shared.rows, key, query, positions=shared.positions)
