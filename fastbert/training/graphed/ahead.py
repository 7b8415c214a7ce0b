"""Batches on the device before their steps: packed by workers into fixed blocks, copied on a stream of its own.

A batch goes from a worker's block to one of a ring of blocks on the device, two steps before its own. The copy waits,
on the device, for the step that read the ring's block last; its step waits, on the device, for the copy. The host waits
for neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch

from fastbert.data.loader import PREFETCHED
from fastbert.packed_inputs import PackedInputs
from fastbert.training.graphed.blocks import Blocks, Made, Stager
from fastbert.training.graphed.buckets import Buckets, Sizes, Staged, stage
from fastbert.training.graphed.lanes import Lane

STEPS_AHEAD = 2
SPARE = 8  # batches that the host may be ahead of the device beside those that the ring holds


class _Sent(NamedTuple):
    """A batch on its way. slot: of the ring, None where it goes by itself; copied: the event of its copy's end."""

    batch: PackedInputs | Staged
    slot: int | None = None
    copied: Any = None


class Ahead:
    """The way of an epoch's batches to the device. Close it behind the loader, whose processes fill its blocks.

    `finish` and `blocks.take`: what `make_loader` gets. `example`: a batch of these. parts: batches of a step.
    """

    def __init__(
        self,
        buckets: Buckets,
        counts: Callable[[PackedInputs], list[int]],
        example: PackedInputs,
        lane: Lane,
        device: torch.device,
        *,
        parts: int = 1,
        workers: int = 0,
    ):
        nbytes, slots = _largest(buckets, example), (STEPS_AHEAD + 1) * parts
        # At most so many are with the workers or have come from them: a batch is handed out when one has come.
        made = max(1, workers * PREFETCHED)
        self.blocks = Blocks(made + slots + SPARE, nbytes, lane, is_shared=workers > 0)
        self.finish = Stager(counts, buckets, self.blocks.memory)
        self._lane, self._parts = lane, parts
        self._ring = torch.empty(slots, nbytes, dtype=torch.uint8, device=device)
        # Of what read each slot last: at first of whoever had this memory before.
        self._read = [lane.record()] * slots

    def steps(self, made: Iterator[Made], count: int) -> Generator[list[PackedInputs | Staged]]:
        """The batches of each of `count` steps. What is in them stays until the next step's are asked for: all that
        reads it must have been launched by then.
        """
        parts, waiting = self._parts, deque[list[_Sent]]()
        if count:
            made = chain([next(made)], made)
            self.blocks.lock()  # the processes that fill them are there: none is forked with memory that CUDA knows of
        for number in range(count + STEPS_AHEAD):
            if number < count:
                first = number % (STEPS_AHEAD + 1) * parts
                waiting.append([self._send(next(made), first + part) for part in range(parts)])
            if number < STEPS_AHEAD:
                continue
            step = waiting.popleft()
            for sent in step:
                if sent.slot is not None:
                    self._lane.steps_wait(sent.copied)
            yield [sent.batch for sent in step]
            ended = self._lane.record()
            for sent in step:
                if sent.slot is not None:
                    self._read[sent.slot] = ended

    def close(self) -> None:
        self.blocks.close()

    def _send(self, made: Made, slot: int) -> _Sent:
        place, batch = made
        if isinstance(batch, PackedInputs):
            self.blocks.free(place)
            return _Sent(self._lane.pinned(batch))
        staged = batch.at(self._ring[slot])
        self._lane.copies_wait(self._read[slot])
        copied = self._lane.copy(staged.block, batch.at(self.blocks.memory[place]).block)
        self.blocks.free_behind(place, copied)
        return _Sent(staged, slot, copied)


def _largest(buckets: Buckets, example: PackedInputs) -> int:
    """Bytes of the largest bucket's batches."""
    empty = example.without_sequences()
    is_labelled = Sizes.of(empty).labelled is not None
    sizes = [bucket for bucket in buckets.sizes if (bucket.labelled is not None) == is_labelled]
    return max(stage(empty, bucket).form.nbytes for bucket in sizes)
