"""Buckets: the sizes that batches are rounded up to, in inference and in training.

Behind a batch's tokens lie padding rows, behind its sequences empty ones, and every op and loss defines both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastbert.packed_inputs import PackedInputs
from fastbert.packing import PackedBatch

# Of a power of two: what tokens are rounded up to. Batches of training have nearly one size, by a budget of tokens, and
# a 17th of their own is padding at most. Texts of inference have any size: at most a third of a graph's rows is
# padding, and 8192 tokens have twenty buckets.
TRAINING, INFERENCE = 1 / 32, 1 / 4


class Sizes(NamedTuple):
    """What a batch has, or what a bucket has room for. labelled: tokens with a label; None where labels are of
    sequences, or there are none.
    """

    total_tokens: int
    batch_size: int
    max_seqlen: int
    labelled: int | None = None

    @classmethod
    def of(cls, packed: PackedInputs) -> Sizes:
        return cls.of_batch(packed["batch"])

    @classmethod
    def of_batch(cls, batch: PackedBatch) -> Sizes:
        labelled = None if batch.labelled is None else batch.labelled.numel()
        return cls(batch.total_tokens, batch.batch_size, batch.max_seqlen, labelled)

    def holds(self, batch: Sizes) -> bool:
        """Whether a batch fits in. Where tokens have labels one is padding: rows that lack a label point there."""
        if (self.labelled is None) != (batch.labelled is None):
            return False
        room = self.total_tokens - (self.labelled is not None)
        fits = batch.total_tokens <= room and batch.batch_size <= self.batch_size
        return fits and batch.max_seqlen <= self.max_seqlen and (batch.labelled or 0) <= (self.labelled or 0)


def bucket_for(batch: Sizes, share: float, num_choices: int = 1, limit: int | None = None) -> Sizes:
    """A bucket with room for this batch and for others of its kind.

    Tokens are rounded up to `share` of a power of two; sequences, of which padding costs nearly nothing, with a quarter
    more; the longest to a power of two, since kernels go by classes of lengths, or to the model's `limit`; labelled
    tokens with a seventh more than this batch's share, and eight.
    """
    labelled = batch.labelled
    tokens = _rounded(batch.total_tokens + (labelled is not None), share)
    sequences = _rounded(-(-5 * batch.batch_size // 4), 1 / 8)
    sequences = -(-sequences // num_choices) * num_choices
    if labelled is not None:
        labelled = min(tokens, _rounded(-(-8 * labelled * tokens // (7 * max(1, batch.total_tokens))) + 8, 2 * share))
    longest = max(16, _power_of_two(batch.max_seqlen))
    if limit is not None:
        longest = max(batch.max_seqlen, min(longest, limit))
    return Sizes(tokens, sequences, longest, labelled)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _rounded(n: int, share: float) -> int:
    """Up to a multiple of 8 and of this share of the next power of two."""
    unit = max(8, int(_power_of_two(n) * share))
    return -(-n // unit) * unit


class Buckets:
    """The buckets of a run: made as batches come, until there are `most`, or planned. Then a batch that none holds has
    none. limit: of a sequence's tokens, None where the model has none.
    """

    def __init__(self, limit: int | None = None, most: int = 24):
        self.limit, self.most = limit, most
        self.sizes: list[Sizes] = []  # the smallest first

    def plan(self, batches: Sequence[Sizes], num_choices: int = 1) -> None:
        """Make those that these batches need, the largest first, and no more later."""
        for batch in sorted(batches, reverse=True):
            self.find(batch, num_choices)
        self.most = len(self.sizes)

    def find(self, batch: Sizes, num_choices: int = 1) -> Sizes | None:
        """The smallest that holds a batch. One with more padding than its own would have is taken where there are
        enough.
        """
        wanted = bucket_for(batch, TRAINING, num_choices, self.limit)
        held = next((bucket for bucket in self.sizes if bucket.holds(batch)), None)
        if held is not None and (held.total_tokens <= wanted.total_tokens or len(self.sizes) >= self.most):
            return held
        if len(self.sizes) >= self.most or batch.total_tokens == 0:
            return None
        self.sizes.append(wanted)
        self.sizes.sort()
        return wanted
