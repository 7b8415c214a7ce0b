"""Memory for what layers on a GPU make, by name, for each layer or add_norm.

Tensors of one name are rows of one buffer where all are alike: to make a tensor takes the host as long as a launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fastbert.ops.layers.gpu.plan import Tensors

_TO_16_BYTES = 4  # of float32: what is launched without a look of Triton's begins at a multiple of that


class Memory:
    """memory[name] has a tensor for each of `count` places, or None.

    like: (total_tokens, width), in the products' dtype. vectors: the parameters' dtype.
    """

    def __init__(self, like: torch.Tensor, vectors: torch.dtype, count: int):
        self._like, self._count = like, count
        self._dtypes = {"rows": like.dtype, "vector": vectors}
        self._whole: dict[str, torch.Tensor] = {}  # of the names whose tensors are rows of one
        self._lists: dict[str, list[Any]] = {}

    def __getitem__(self, name: str) -> list[Any]:
        return self._lists.setdefault(name, [None] * self._count)

    def make(self, tensors: Tensors) -> None:
        if not tensors.indices:
            return
        if tensors.are_alike:
            shape = (len(tensors.indices), *self._shape(tensors, tensors.widths[0]))
            self._put_whole(tensors, self._new(shape, tensors))
        else:
            self._put(tensors, [self._new(self._shape(tensors, width), tensors) for width in tensors.widths])

    def make_in_turn(self, tensors: Tensors) -> None:
        """Where one place at a time uses its own: those of one shape are one."""
        by_width = {width: self._new(self._shape(tensors, width), tensors) for width in set(tensors.widths)}
        self._put(tensors, [by_width[width] for width in tensors.widths])

    def held(self, names: Iterable[Tensors]) -> list[torch.Tensor]:
        """What has to be kept that these are there again: see `take`."""
        held: list[torch.Tensor] = []
        for tensors in names:
            if tensors.name in self._whole:
                held.append(self._whole[tensors.name])
            else:
                held += [self[tensors.name][at] for at in tensors.indices]
        return held

    def take(self, tensors: Tensors, held: Iterator[torch.Tensor]) -> None:
        """What `held` gave, which goes on behind it."""
        if not tensors.indices:
            return
        if tensors.are_alike:
            self._put_whole(tensors, next(held))
        else:
            self._put(tensors, [next(held) for _ in tensors.indices])

    def _put_whole(self, tensors: Tensors, whole: torch.Tensor) -> None:
        self._whole[tensors.name] = whole
        self._put(tensors, whole.unbind())

    def _put(self, tensors: Tensors, values: Sequence[torch.Tensor]) -> None:
        mine = self[tensors.name]
        for at, t in zip(tensors.indices, values, strict=True):
            mine[at] = t

    def share(self, name: str, other: str) -> None:
        """Two names of the same."""
        self._lists[name] = self[other]

    def split_columns(self, name: str, names: Sequence[str], sizes: Sequence[Sequence[int]]) -> None:
        """Columns of each tensor of a name, as names of their own. sizes: of each."""
        self._name_parts(
            names, [t.split_with_sizes(each, -1) for t, each in zip(self._there(name), sizes, strict=True)]
        )

    def split_rows(self, name: str, names: Sequence[str]) -> None:
        """The rows of each tensor of a name, as names of their own."""
        self._name_parts(names, [t.unbind() for t in self._there(name)])

    def _there(self, name: str) -> list[torch.Tensor]:
        return [t for t in self[name] if t is not None]

    def _name_parts(self, names: Sequence[str], apart: Sequence[Sequence[torch.Tensor]]) -> None:
        for part, tensors in zip(names, zip(*apart, strict=True), strict=True):
            self._lists[part] = [*tensors]

    def vectors_apart(self, name: str, sizes: Sequence[Sequence[int]]) -> list[Sequence[torch.Tensor]]:
        """Parts of each vector of a name, of these sizes; none where there is none."""
        if name in self._whole and len({tuple(each) for each in sizes}) == 1:
            parts = self._whole[name].split_with_sizes(sizes[0], 1)
            return [*zip(*[part.unbind() for part in parts], strict=True)]
        return [() if t is None else t.split(size) for t, size in zip(self[name], sizes, strict=True)]

    def _shape(self, tensors: Tensors, width: int) -> tuple[int, ...]:
        total_tokens, shape_name = self._like.shape[0], tensors.shape_name
        if shape_name == "vector":
            return (width,)
        if shape_name == "rows":
            return (total_tokens, width)
        size = -(-width * total_tokens // _TO_16_BYTES) * _TO_16_BYTES
        return (size,) if shape_name == "numbers" else (2, size)

    def _new(self, shape: tuple[int, ...], tensors: Tensors) -> torch.Tensor:
        return self._like.new_empty(shape, dtype=self._dtypes.get(tensors.shape_name, torch.float32))
