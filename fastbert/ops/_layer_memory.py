"""Memory for what layers on a GPU make, by name, for each layer or junction.

Tensors of one name are rows of one buffer where all are alike: to make a tensor takes the host as long as a launch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from fastbert.ops._layer_plan import Plan, Tensors

_TO_16_BYTES = 4  # of float32: what is launched again without a look begins at a multiple of that


class Memory:
    """memory[name] has a tensor for each of `count` places, or None; memory.at(name) what launches take of it: its
    address, or the tensor.

    like: (total_tokens, width), in the products' dtype. vectors: the parameters' dtype. theirs: names of what kernels
    make themselves: their places are filled by the caller, and each tensor is held by itself.
    """

    def __init__(
        self,
        like: torch.Tensor,
        vectors: torch.dtype,
        count: int,
        theirs: Collection[str] = (),
        by_address: bool = False,
    ):
        self._like, self._count, self._theirs, self._by_address = like, count, theirs, by_address
        self._dtypes = {"rows": like.dtype, "vector": vectors}
        self._whole: dict[str, tuple[Sequence[int], torch.Tensor]] = {}  # places, whose tensors are rows of one
        self._single: dict[str, dict[int, torch.Tensor]] = {}
        self._lists: dict[str, list[Any]] = {}
        self._ats: dict[str, list[Any]] = {}

    def __getitem__(self, name: str) -> list[Any]:
        found = self._lists.get(name)
        if found is None:
            found = self._lists[name] = [None] * self._count
            if name in self._whole:
                places, whole = self._whole[name]
                for at, t in zip(places, whole.unbind(), strict=True):
                    found[at] = t
            for at, t in self._single.get(name, {}).items():
                found[at] = t
        return found

    def at(self, name: str) -> list[Any]:
        if not self._by_address:
            return self[name]
        found = self._ats.get(name)
        if found is None:
            if name in self._whole and name not in self._lists:
                found = [None] * self._count
                places, whole = self._whole[name]
                for at, address in zip(places, rows_at(whole), strict=True):
                    found[at] = address
                for at, t in self._single.get(name, {}).items():
                    found[at] = t.data_ptr()
            else:
                found = [None if t is None else t.data_ptr() for t in self[name]]
            self._ats[name] = found
        return found

    def make(self, tensors: Tensors) -> None:
        if tensors.name in self._theirs or not tensors.places:
            return
        if tensors.are_alike:
            shape = (len(tensors.places), *self._shape(tensors, tensors.widths[0]))
            self._whole[tensors.name] = tensors.places, self._new(shape, tensors)
        else:
            self._put(tensors, [self._new(self._shape(tensors, width), tensors) for width in tensors.widths])

    def make_in_turn(self, tensors: Tensors) -> None:
        """Where one place at a time uses its own: those of one shape are one."""
        made = {width: self._new(self._shape(tensors, width), tensors) for width in set(tensors.widths)}
        self._put(tensors, [made[width] for width in tensors.widths])

    def held(self, names: Iterable[Tensors]) -> list[torch.Tensor]:
        """What has to be kept that these are there again: see `take`."""
        held: list[torch.Tensor] = []
        for tensors in names:
            if tensors.name in self._whole:
                held.append(self._whole[tensors.name][1])
            else:
                held += [self[tensors.name][at] for at in tensors.places]
        return held

    def take(self, tensors: Tensors, held: Iterator[torch.Tensor]) -> None:
        """What `held` gave, which goes on behind it."""
        if not tensors.places:
            return
        if tensors.are_alike and tensors.name not in self._theirs:
            self._whole[tensors.name] = tensors.places, next(held)
        else:
            self._put(tensors, [next(held) for _ in tensors.places])

    def _put(self, tensors: Tensors, given: Sequence[torch.Tensor]) -> None:
        mine = self[tensors.name]
        for at, t in zip(tensors.places, given, strict=True):
            mine[at] = t

    def put(self, name: str, place: int, t: torch.Tensor) -> None:
        """At a place that has none of this name, before launches have taken any of them."""
        self._single.setdefault(name, {})[place] = t
        if name in self._lists:
            self._lists[name][place] = t

    def share(self, name: str, other: str) -> None:
        """Two names of the same."""
        (self._ats if self._by_address else self._lists)[name] = self.at(other)

    def split_columns(self, name: str, names: Sequence[str], sizes: Sequence[Sequence[int]]) -> None:
        """Columns of each tensor of a name, as names of their own. sizes: of each."""
        if not self._by_address:
            self._name_parts(
                names, [t.split_with_sizes(each, -1) for t, each in zip(self._there(name), sizes, strict=True)]
            )
            return
        addresses, element = self.at(name), self._like.element_size()
        for part, widths in zip(names, zip(*sizes, strict=True), strict=True):
            self._ats[part] = addresses
            addresses = [at + element * width for at, width in zip(addresses, widths, strict=False)]

    def split_rows(self, name: str, names: Sequence[str]) -> None:
        """The rows of each tensor of a name, as names of their own."""
        if self._by_address:
            if name in self._whole:
                whole = self._whole[name][1]
                steps = [whole.stride(1) * whole.element_size()] * whole.shape[0]
            else:
                steps = [t.stride(0) * t.element_size() for t in self._there(name)]
            for i, part in enumerate(names):
                self._ats[part] = [at + i * step for at, step in zip(self.at(name), steps, strict=False)]
            return
        self._name_parts(names, [t.unbind() for t in self._there(name)])

    def _there(self, name: str) -> list[torch.Tensor]:
        return [t for t in self[name] if t is not None]

    def _name_parts(self, names: Sequence[str], apart: Sequence[Sequence[torch.Tensor]]) -> None:
        for part, given in zip(names, zip(*apart, strict=True), strict=True):
            self._lists[part] = [*given]

    def vectors_apart(self, name: str, sizes: Sequence[Sequence[int]]) -> list[Sequence[torch.Tensor]]:
        """Parts of each vector of a name, of these sizes; none where there is none."""
        if name in self._whole and len({tuple(each) for each in sizes}) == 1:
            parts = self._whole[name][1].split_with_sizes(sizes[0], 1)
            return [*zip(*[part.unbind() for part in parts], strict=True)]
        return [() if t is None else t.split(size) for t, size in zip(self[name], sizes, strict=True)]

    def _shape(self, tensors: Tensors, width: int) -> tuple[int, ...]:
        total_tokens, form = self._like.shape[0], tensors.form
        if form == "vector":
            return (width,)
        if form == "rows":
            return (total_tokens, width)
        size = -(-width * total_tokens // _TO_16_BYTES) * _TO_16_BYTES
        return (size,) if form == "numbers" else (2, size)

    def _new(self, shape: tuple[int, ...], tensors: Tensors) -> torch.Tensor:
        return self._like.new_empty(shape, dtype=self._dtypes.get(tensors.form, torch.float32))


def weights_memory(plan: Plan, x: torch.Tensor, vectors: torch.dtype) -> list[torch.Tensor]:
    """For what _merged_weights.py makes of parameters of the dtype of `vectors`: weights as products of x take them,
    and those vectors that junctions take.
    """
    size = plan.layout.merged_size(vectors is not x.dtype)
    return [x.new_empty(size), x.new_empty(plan.size_of_vectors, dtype=vectors)]


def rows_at(whole: torch.Tensor) -> range:
    """The addresses of its rows, along the first axis."""
    first, step = whole.data_ptr(), whole.stride(0) * whole.element_size()
    return range(first, first + step * whole.shape[0], step)
