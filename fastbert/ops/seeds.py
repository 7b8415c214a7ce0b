"""Where ops that drop take their seeds from: torch's generator, or one tensor with those of a whole step."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class StepSeeds:
    """The seeds of a training step's ops in one tensor on `device`, which the host fills before the step.

    An op that draws for itself launches a kernel for two numbers, on a GPU, and moves a generator on. Inside of
    `seeds_from` it takes the next row instead. Which rows an op gets depends on the ops before it alone, so a step
    repeats with its seed.
    """

    def __init__(self, device: torch.device | str):
        self.device = torch.empty(0, device=device).device  # "cuda" is the current GPU
        self.next_row = 0  # of the row that comes next
        self._most = 0  # rows that a step took
        self._generator = torch.Generator()
        self.rows = torch.empty(0, 2, dtype=torch.int64, device=self.device)

    def begin(self, seed: int) -> None:
        """A step's rows: as many as the longest one before it took. From the second step of a kind on they are written
        where the last step's were, which are not read any more.
        """
        self._generator.manual_seed(seed)
        rows, self.next_row = self._drawn(self._most), 0
        if len(rows) == len(self.rows):
            self.rows.copy_(rows, non_blocking=True)
        else:
            self.rows = rows.to(self.device, non_blocking=True)

    def take(self, count: int) -> torch.Tensor:
        """The next rows, int64 (count, 2)."""
        start, self.next_row = self.next_row, self.next_row + count
        if self.next_row > len(self.rows):  # in first steps
            more = self._drawn(self.next_row - len(self.rows))
            self.rows = torch.cat([self.rows, more.to(self.device, non_blocking=True)])
        self._most = max(self._most, self.next_row)
        return self.rows[start : self.next_row]

    def _drawn(self, count: int) -> torch.Tensor:
        # One after the other: the first rows are the same, however many there are.
        is_pinned = self.device.type == "cuda"
        rows = torch.empty(count, 2, dtype=torch.int64, pin_memory=is_pinned)
        return rows.random_(2**62, generator=self._generator)


class _Here(threading.local):
    seeds: StepSeeds | None = None


_here = _Here()


@contextmanager
def seeds_from(seeds: StepSeeds | None) -> Iterator[None]:
    """Inside, and in this thread, ops on the seeds' device take them from there; None: they draw for themselves.

    What runs a part of a model twice, checkpointing for example, gives both runs the same seeds by `with_same_seeds`.
    """
    before, _here.seeds = _here.seeds, seeds
    try:
        yield
    finally:
        _here.seeds = before


def with_same_seeds(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be run more than once: each time its ops take the seeds that come next now, in any thread."""
    seeds = _here.seeds
    if seeds is None:
        return function
    first = seeds.next_row

    def run(*arguments: Any, **options: Any) -> Any:
        furthest, seeds.next_row = seeds.next_row, first
        try:
            with seeds_from(seeds):
                return function(*arguments, **options)
        finally:
            seeds.next_row = max(furthest, seeds.next_row)

    return run


def draw_seeds(device: torch.device, *shape: int) -> torch.Tensor:
    """Philox seeds and offsets, int64 (*shape, 2) on `device`, for kernels that drop."""
    if not torch.compiler.is_compiling():
        seeds = _here.seeds
        if seeds is not None and seeds.device == device:
            return seeds.take(math.prod(shape)).view(*shape, 2)
    return torch.randint(2**62, (*shape, 2), dtype=torch.int64, device=device)
