"""Which examples make up each step of an epoch, and which rank and which part of the step gets which of them.

A step has a budget of tokens, and what is in it depends on the seed, the epoch and the lengths alone: not on the number
of ranks, of parts or of workers. Without padding a sequence costs what its own tokens cost, so a step's examples are
dealt out by their cost, and no rank waits for another.
"""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

from fastbert.data.collator import KEY
from fastbert.data.masking import example_keys, mixed
from fastbert.errors import InputError

GROUP_STEPS = 50  # whose examples are sorted by length together, where that is asked for


@dataclass(frozen=True)
class Steps:
    """How a data set is cut into steps.

    Args:
        lengths: tokens of each example, (examples,).
        step_tokens: of one step of the optimizer, over all ranks: an upper bound.
        max_examples: of one step, an upper bound, too; None: as many as the tokens allow.
        seed: of the order of the examples, which is another in each epoch. None: the order of the data set.
        group_by_length: examples of a step are of similar length. Every example still comes once an epoch.

    Raises InputError: an empty data set, an example without tokens, or one longer than a step.
    """

    lengths: np.ndarray
    step_tokens: int
    max_examples: int | None = None
    seed: int | None = 0
    group_by_length: bool = False

    def __post_init__(self) -> None:
        lengths = np.asarray(self.lengths, np.int64)
        object.__setattr__(self, "lengths", lengths)
        if not len(lengths):
            raise InputError("there are no examples")
        if lengths.min() < 1:
            raise InputError(f"example {lengths.argmin()} has no tokens")
        if lengths.max() > self.step_tokens:
            raise InputError(
                f"example {lengths.argmax()} has {lengths.max()} tokens, and a step has {self.step_tokens}: give a step"
                " more, or cut the examples"
            )
        if self.max_examples is not None and self.max_examples < 1:
            raise InputError(f"max_examples is {self.max_examples}; it must be at least 1")

    def of_epoch(self, epoch: int) -> list[np.ndarray]:
        """The indices of each step's examples, in order."""
        count = len(self.lengths)
        order = np.arange(count) if self.seed is None else np.argsort(example_keys(self.seed, epoch, range(count)))
        if self.group_by_length:
            mean_step = max(1, int(self.step_tokens / self.lengths.mean()))
            block = np.arange(count) // (mean_step * GROUP_STEPS)
            order = order[np.lexsort((self.lengths[order], block))]
        steps = self._cut(order)
        if self.group_by_length and self.seed is not None:  # else each block would go from short to long
            keys = mixed(example_keys(self.seed, epoch, range(len(steps))))
            steps = [steps[i] for i in np.argsort(keys)]
        return steps

    def _cut(self, order: np.ndarray) -> list[np.ndarray]:
        ends = np.cumsum(self.lengths[order])
        steps, start, before = [], 0, 0
        while start < len(order):
            stop = int(np.searchsorted(ends, before + self.step_tokens, "right"))
            if self.max_examples is not None:
                stop = min(stop, start + self.max_examples)
            steps.append(order[start:stop])
            start, before = stop, int(ends[stop - 1])
        return steps


def cost(lengths: np.ndarray, hidden_size: int) -> np.ndarray:
    """What sequences cost, in tokens of a very short one.

    A layer takes 24 S H^2 multiplications and additions in its products and 4 S^2 H in attention (S tokens, H numbers
    each, a feed-forward of 4 H), which is the same at S = 6 H.
    """
    return lengths * (1.0 + lengths / (6.0 * hidden_size))


def deal(costs: np.ndarray, parts: int) -> list[np.ndarray]:
    """Indices of `costs` in so many parts of nearly the same sum: the dearest first, each to the part that has least
    (Graham 1969, longest processing time first). A part may be empty.
    """
    if parts == 1:
        return [np.arange(len(costs))]
    sums = [(0.0, part) for part in range(parts)]
    members: list[list[int]] = [[] for _ in range(parts)]
    for i in np.argsort(-costs, kind="stable").tolist():
        total, part = heapq.heappop(sums)
        members[part].append(i)
        heapq.heappush(sums, (total + float(costs[i]), part))
    return [np.array(sorted(part), np.int64) for part in members]


class StepSampler(Sampler[list[int]]):
    """The batches of one rank in an epoch, for DataLoader's `batch_sampler`: the indices of each batch's examples.

    Each step gives `parts` batches, whose gradients one step of the optimizer adds up. Where a step has fewer examples
    than there are ranks and parts, batches are empty: every rank has the same number of them. Rank 0 warns where most
    steps are so. A run that stopped goes on with `start_step`.

    Args:
        steps: what a step consists of. hidden_size: the model's, which says how dear a long sequence is.
        epoch: from 0. start_step: the first that is given.
        rank, world_size: of this process, and how many there are. parts: batches in a step of one rank.
    """

    def __init__(
        self,
        steps: Steps,
        hidden_size: int,
        *,
        epoch: int = 0,
        start_step: int = 0,
        rank: int = 0,
        world_size: int = 1,
        parts: int = 1,
    ):
        if not 0 <= rank < world_size or parts < 1:
            raise InputError(
                f"rank is {rank} of world_size {world_size}, and parts is {parts}: rank must be from 0 to world_size -"
                " 1, and parts at least 1"
            )
        self.steps, self.hidden_size, self.epoch, self.start_step = steps, hidden_size, epoch, start_step
        self.rank, self.world_size, self.parts = rank, world_size, parts
        self.plan = steps.of_epoch(epoch)
        short = sum(len(step) < world_size * parts for step in self.plan)
        if rank == 0 and 2 * short > len(self.plan):
            warnings.warn(
                f"{short} of {len(self.plan)} steps have fewer examples than {world_size} ranks with {parts} batches"
                " each: some compute nothing. Give a step more tokens",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return (len(self.plan) - self.start_step) * self.parts

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.plan[self.start_step :]:
            for part in self.batches_of(step):
                yield part.tolist()

    def batches_of(self, step: np.ndarray) -> list[np.ndarray]:
        """This rank's batches of a step of the plan: the indices of each one's examples."""
        dealt = deal(cost(self.steps.lengths[step], self.hidden_size), self.world_size * self.parts)
        if len(step) < len(dealt):  # the first ones have an example each: one goes to every rank, then a second one
            mine = dealt[self.rank :: self.world_size]
        else:
            mine = dealt[self.rank * self.parts : (self.rank + 1) * self.parts]
        return [step[part] for part in mine]


class KeyedDataset(Dataset):
    """A data set in an epoch: its examples say, under `example_key`, what their masks come from."""

    def __init__(self, examples: Sequence[Any], seed: int, epoch: int):
        self.examples, self.seed, self.epoch = examples, seed, epoch

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        fetch = getattr(self.examples, "__getitems__", None)  # `datasets` reads many at once much faster
        fetched = [self.examples[i] for i in indices] if fetch is None else fetch(indices)
        keys = example_keys(self.seed, self.epoch, indices).tolist()
        return [{**example, KEY: key} for example, key in zip(fetched, keys, strict=True)]
