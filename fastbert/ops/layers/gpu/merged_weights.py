"""The weights of layers as their products take them on a GPU: those of one product beside each other, all of them in
the dtype of the products, made in one launch for all layers of a step; and their gradients, which lie likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fastbert.ops._common import define_triton
from fastbert.ops.layers.layer_numbers import LayerNumbers

# addresses, offsets int64, counts int32 (blocks,): where a block of a matrix lies, where it goes to in `merged`, and
# how many elements it has, 2048 at most. like: one of the matrices. Elements of `merged` that no block has are not
# written.
_MERGE = define_triton(
    "merge_matrices",
    "(Tensor addresses, Tensor counts, Tensor offsets, Tensor like, bool is_aligned, Tensor(a!) merged) -> ()",
    "merging",
    lambda addresses, counts, offsets, like, is_aligned, merged: None,
)
BLOCK = 2048  # of the kernel
_ALIGNED = 16  # bytes: a load of the kernel's
PAD = 64  # elements: what begins at a multiple of them is aligned in every dtype


class Part(NamedTuple):
    """What one product is made of, or its bias: the rows of each Linear, below each other, from `offset` on."""

    rows: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, rows: Sequence[int], columns: int | None, offset: int) -> Part:
        """columns None: a bias."""
        if columns is None:
            return cls(tuple(rows), (sum(rows),), (1,), offset)
        return cls(tuple(rows), (sum(rows), columns), (columns, 1), offset)

    @property
    def end(self) -> int:
        """Where the next one may begin."""
        size = self.shape[0] * (self.shape[1] if len(self.shape) > 1 else 1)
        return -(-(self.offset + size) // PAD) * PAD

    def offsets(self) -> list[int]:
        """Where the rows of each Linear begin."""
        columns = self.shape[1] if len(self.shape) > 1 else 1
        return [self.offset + sum(self.rows[:i]) * columns for i in range(len(self.rows))]

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.shape, self.strides, self.offset)


class Run:
    """One product's parts, or its biases', of all layers; parts: None where a layer has no bias.

    step: how far they lie apart, None where layers differ: a run's tensors are then made one by one, and else as the
    rows of one, which takes a sixth of the time.
    """

    def __init__(self, parts: Sequence[Part | None]):
        self.parts = parts
        alike = {None if part is None else (part.rows, part.shape) for part in parts}
        steps = {b.offset - a.offset for a, b in pairwise(parts) if a is not None and b is not None}
        self.step = None if None in alike or len(alike) > 1 or len(steps) > 1 else max(steps, default=0)

    def within(self, flat: torch.Tensor, transposed: bool = False) -> Sequence[torch.Tensor | None]:
        """Of each layer (rows, columns), or a bias (rows,); transposed: (columns, rows)."""
        first = self.parts[0]
        if self.step is None or first is None:
            each = [None if part is None else part.within(flat) for part in self.parts]
            return [None if t is None else t.t() for t in each] if transposed else each
        shape, strides = first.shape, first.strides
        if transposed:
            shape, strides = shape[::-1], strides[::-1]
        return flat.as_strided((len(self.parts), *shape), (self.step, *strides), first.offset).unbind()

    def linears(self, flat: torch.Tensor) -> list[Sequence[torch.Tensor]]:
        """Of layers that are alike: for each Linear of the product, its rows of each layer."""
        first, step, by_linear = self.parts[0], self.step, list[Sequence[torch.Tensor]]()
        assert first is not None and step is not None
        for rows, offset in zip(first.rows, first.offsets(), strict=True):
            size = (len(self.parts), rows, *first.shape[1:])
            by_linear.append(flat.as_strided(size, (step, *first.strides), offset).unbind())
        return by_linear


class _Copied(NamedTuple):
    """By their places among the operands: weights that are copied, and that are not; biases that are. offsets: where
    all of the former go to, and then the latter."""

    weights: list[int]
    kept: list[int]
    biases: list[int]
    offsets: list[int]


class Layout:
    """How weights of layers lie in one buffer.

    products: of each layer, its qkv, attention output, ups and down, `size` elements in all; biases: behind them, those
    of qkv and of ups, None where there is none. shapes: of the Linears' weights, in the operands' order.
    """

    def __init__(self, layers: Sequence[LayerNumbers], hidden_size: int, intermediate_sizes: Sequence[int]):
        self.products: list[list[Part]] = []
        self.biases: list[list[Part | None]] = []
        at = 0
        for layer, inner in zip(layers, intermediate_sizes, strict=True):
            products = []
            for rows, columns in zip(
                _rows(layer, hidden_size, inner), _columns(layer, hidden_size, inner), strict=True
            ):
                products.append(Part.of(rows, columns, at))
                at = products[-1].end
            self.products.append(products)
        self.size = at
        self.product_biases: list[int] = []  # which of the operands' biases are those
        count = 0
        for layer, (qkv, _, up, _) in zip(layers, self.products, strict=True):
            there = [i for i in range(layer.num_linears) if layer.biases >> i & 1]
            others = (len(qkv.rows), layer.num_linears - 1)
            self.product_biases += [count + at for at, i in enumerate(there) if i not in others]
            count += len(there)
            layer_biases: list[Part | None] = []
            for part, linear in ((qkv, 0), (up, len(qkv.rows) + 1)):
                if layer.biases >> linear & 1:
                    layer_biases.append(Part.of(part.rows, None, at))
                    at = layer_biases[-1].end  # type: ignore[union-attr]
                else:
                    layer_biases.append(None)
            self.biases.append(layer_biases)
        self.size_with_biases = at
        self.runs = [Run([layer[i] for layer in self.products]) for i in range(4)]
        self.bias_runs = [Run([layer[i] for layer in self.biases]) for i in range(2)]
        parts = [part for layer in self.products for part in layer]
        self.shapes = [(rows, part.shape[1]) for part in parts for rows in part.rows]
        self._copied: dict[bool, _Copied] = {}

    def copied(self, all_weights: bool) -> _Copied:
        """What `merge_weights` copies: all weights, or those of several Linears of one product; and biases."""
        if all_weights not in self._copied:
            self._copied[all_weights] = self._new_copied(all_weights)
        return self._copied[all_weights]

    def _new_copied(self, all_weights: bool) -> _Copied:
        weights: list[int] = []
        kept: list[int] = []
        offsets: list[int] = []
        at = 0
        for part in [part for layer in self.products for part in layer]:
            leaves = range(at, at + len(part.rows))
            at += len(part.rows)
            if all_weights or len(part.rows) > 1:
                weights += leaves
                offsets += part.offsets()
            else:
                kept += leaves
        for part in [part for layer in self.biases for part in layer if part is not None]:
            offsets += part.offsets()
        return _Copied(weights, kept, self.product_biases, offsets)

    def merged_size(self, all_weights: bool) -> int:
        """Of the buffer that has what is copied."""
        return self.size_with_biases if self.copied(all_weights).offsets else 0

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The part of each Linear's weight of a buffer that has all of them: their gradients."""
        if all([run.step is not None for run in self.runs]):
            return [
                t
                for layer in zip(*[each for run in self.runs for each in run.linears(flat)], strict=True)
                for t in layer
            ]
        parts = [part for layer in self.products for part in layer]
        return [
            flat.as_strided((rows, part.shape[1]), part.strides, offset)
            for part in parts
            for rows, offset in zip(part.rows, part.offsets(), strict=True)
        ]


def _rows(layer: LayerNumbers, hidden_size: int, inner: int) -> list[list[int]]:
    """Of the Linears of each product: qkv, attention output, ups, down."""
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    qkv = [queries + 2 * keys] if layer.merged_qkv else [queries, keys, keys]
    ups = [2 * inner] if layer.merged_gate else [inner] * (2 if layer.gated else 1)
    return [qkv, [hidden_size], ups, [hidden_size]]


def _columns(layer: LayerNumbers, hidden_size: int, inner: int) -> list[int]:
    return [hidden_size, layer.num_heads * layer.head_dim, hidden_size, inner]


class _Table(NamedTuple):
    """What is copied where: `_MERGE`'s operands, and the addresses by which it is known."""

    known_by: tuple
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    is_aligned: bool


# By the first weight, and gone with it; then by what it is of: weights or vectors, and of how many layers that begin
# with it, a stack or its first layer alone. A table stays for as long as the tensors stay where they are: a captured
# step reads it again.
_tables: Any = WeakIdKeyDictionary()


def weight_tables(first: torch.Tensor) -> dict[Any, _Table]:
    """Those of layers of which this is the first weight."""
    return _tables.setdefault(first, {})  # type: ignore[no-any-return]


def merge_weights(
    tables: dict[Any, _Table],
    layout: Layout,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    flat: torch.Tensor,
) -> None:
    """Copy all that has to be, to its place in `flat` (layout.merged_size,): weights of another dtype, several Linears
    of one product, and the biases of qkv and ups.
    """
    which = layout.copied(weights[0].dtype is not flat.dtype)
    copied = [*[weights[i] for i in which.weights], *[biases[i] for i in which.biases]]
    if copied:
        _merge(tables, ("weights", len(layout.products)), copied, which.offsets, flat)


def merge_vectors(
    tables: dict[Any, _Table], vectors: Sequence[torch.Tensor], offsets: Sequence[int], flat: torch.Tensor
) -> None:
    """Copy vectors, of the dtype of `flat`, to their places there."""
    _merge(tables, ("vectors", len(vectors)), vectors, offsets, flat)


def _merge(
    tables: dict[Any, _Table], name: Any, copied: Sequence[torch.Tensor], offsets: Sequence[int], flat: torch.Tensor
) -> None:
    dtype = flat.dtype
    known_by = (dtype, *map(torch.Tensor.data_ptr, copied))
    table = tables.get(name)
    if table is None or table.known_by != known_by:
        table = tables[name] = _new_table(copied, offsets, known_by, dtype)
    _MERGE(*table.operands, copied[0], table.is_aligned, flat)


def is_copied(part: Part, weight_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    return weight_dtype is not dtype or len(part.rows) > 1


def _new_table(copied: Sequence[torch.Tensor], offsets: Sequence[int], known_by: tuple, dtype: torch.dtype) -> _Table:
    """In Python, once: no tensor is asked for a value."""
    addresses, counts, to = list[int](), list[int](), list[int]()
    for t, offset in zip(copied, offsets, strict=True):
        address, size, width = t.data_ptr(), t.numel(), t.element_size()
        for start in range(0, size, BLOCK):
            addresses.append(address + width * start)
            counts.append(min(BLOCK, size - start))
            to.append(offset + start)
    is_aligned = not any(n % _ALIGNED for n in (*addresses, *to))
    device = copied[0].device
    operands = (
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.tensor(to, dtype=torch.int64, device=device),
    )
    return _Table(known_by, operands, is_aligned)
