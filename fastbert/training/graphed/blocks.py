"""Blocks of host memory that stay where they are: whoever makes a batch packs it into one, and it is copied from there.

Blocks are dealt out in the process that trains, with the indices of the examples: no process ever waits for another one
to give a block back, and one that is killed takes nothing along that others would wait for.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fastbert.errors import TrainingError
from fastbert.packed_inputs import PackedInputs
from fastbert.training.graphed.buckets import Buckets, Form, Sizes, Staged, stage
from fastbert.training.graphed.lanes import Lane


class Described(NamedTuple):
    """What is to be known of a batch that lies in a block: a `Staged` without its bytes."""

    form: Form
    bounds: Mapping[str, tuple[int, int]]
    counts: list[int]
    tokens: int

    def at(self, block: torch.Tensor) -> Staged:
        return Staged(self.form, block[: self.form.nbytes], self.bounds, self.counts, self.tokens)


class Made(NamedTuple):
    """A batch as it comes from where it was made.

    place: of the block that it was handed out with. batch: what lies there; or the batch itself, and nothing does.
    """

    place: int
    batch: Described | PackedInputs


class Stager:
    """Puts batches into blocks, in their buckets' sizes, where they are made. One that no bucket holds, or that is too
    large for a block, stays as it is.
    """

    def __init__(self, counts: Callable[[PackedInputs], list[int]], buckets: Buckets, memory: torch.Tensor):
        self.counts, self.buckets, self.memory = counts, buckets, memory

    def __call__(self, packed: PackedInputs, place: int) -> Made:
        bucket, block = self.buckets.find(Sizes.of(packed), packed.get("num_choices", 1)), self.memory[place]
        if bucket is None:
            return Made(place, packed)
        staged = stage(packed, bucket, self.counts(packed), block)
        if staged.form.nbytes > len(block):
            return Made(place, packed)
        return Made(place, Described(staged.form, staged.bounds, staged.counts, staged.tokens))


class Blocks:
    """The blocks of an epoch, and which of them are free. `memory`: uint8 (count, nbytes).

    is_shared: other processes fill them. Raises TrainingError: there is no room for shared memory.
    """

    def __init__(self, count: int, nbytes: int, lane: Lane, *, is_shared: bool):
        self.memory = torch.empty(count, nbytes, dtype=torch.uint8)
        if is_shared:
            try:
                self.memory.share_memory_()
            except RuntimeError as error:
                raise TrainingError(
                    f"{count} blocks of {nbytes} bytes for batches do not fit into shared memory: {error}. Fewer"
                    " workers need fewer"
                ) from None
        self._lane, self._is_locked = lane, False
        self._free = deque(range(count))
        self._leaving: deque[tuple[int, Any]] = deque()  # in the order of their copies, which end in this order

    @property
    def num_free(self) -> int:
        """Those included whose copy has ended by now."""
        while self._leaving and self._lane.is_done(self._leaving[0][1]):
            self.free(self._leaving.popleft()[0])
        return len(self._free)

    def take(self) -> int:
        """A free block. Where all are under way it pauses until the oldest copy has ended.

        That costs the device nothing: blocks are short only where it has more steps to run than the host need be ahead.
        It comes to an end: a copy waits for steps that are launched already, and there are more blocks than batches
        that are being made, or whose copies are not launched (`Ahead` counts them).
        """
        while not self.num_free:
            assert self._leaving, "more blocks were taken than come back"
            self._lane.pause()
        return self._free.popleft()

    def free(self, place: int) -> None:
        """Give a block back from which nothing is copied."""
        self._free.append(place)

    def free_behind(self, place: int, copied: Any) -> None:
        """Give a block back when its copy has ended: the event of that."""
        self._leaving.append((place, copied))

    def lock(self) -> None:
        """Page-lock the memory; if that fails, copies make the host wait, and one warning says why."""
        if (reason := self._lane.lock(self.memory)) is None:
            self._is_locked = True
        else:
            warnings.warn(f"the blocks for batches are not page-locked, so copies wait: {reason}", stacklevel=2)

    def close(self) -> None:
        """Wait for the copies that are under way, and let go of the memory."""
        for _, copied in self._leaving:
            while not self._lane.is_done(copied):
                self._lane.pause()
        if self._is_locked:
            self._lane.unlock(self.memory)
            self._is_locked = False
