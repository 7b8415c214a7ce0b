"""Buckets: the sizes of captured steps, and a batch as one block of bytes that is copied in one piece.

Batches by a token budget have nearly one size. Each is put into the smallest bucket that holds it; behind its tokens
lies slack, behind its sequences are empty ones, and every op and loss defines both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fastbert.packed_inputs import PackedInputs
from fastbert.packing import PackedBatch

_ALIGNED = 16  # bytes: where a field begins
STEP = 1 / 16  # of a bucket's tokens: what lies between it and the next smaller one at most


class Sizes(NamedTuple):
    """What a batch has, or what a bucket has room for. labelled: tokens with a label; None where labels are of
    sequences, or there are none.
    """

    total_tokens: int
    batch_size: int
    max_seqlen: int
    labelled: int | None

    @classmethod
    def of(cls, packed: PackedInputs) -> Sizes:
        batch: PackedBatch = packed["batch"]
        labelled = None if batch.labelled is None else batch.labelled.numel()
        return cls(batch.total_tokens, batch.batch_size, batch.max_seqlen, labelled)

    def holds(self, batch: Sizes) -> bool:
        """Whether a batch fits in. Where tokens have labels one token is slack: rows that lack a label point there."""
        if (self.labelled is None) != (batch.labelled is None):
            return False
        room = self.total_tokens - (self.labelled is not None)
        fits = batch.total_tokens <= room and batch.batch_size <= self.batch_size
        return fits and batch.max_seqlen <= self.max_seqlen and (batch.labelled or 0) <= (self.labelled or 0)


def bucket_for(batch: Sizes, num_choices: int = 1, limit: int | None = None) -> Sizes:
    """A bucket with room for this batch and for others of its kind.

    Tokens are rounded up to a sixteenth of a power of two, so that at most a 17th of a batch's own tokens is slack;
    sequences, of which slack costs nearly nothing, with a quarter more; the longest to a power of two, since kernels go
    by classes of lengths, or to the model's `limit`; labelled tokens with a seventh more than this batch's share, and
    eight.
    """
    labelled = batch.labelled
    tokens = _rounded(batch.total_tokens + (labelled is not None), STEP / 2)
    sequences = _rounded(-(-5 * batch.batch_size // 4), 1 / 8)
    sequences = -(-sequences // num_choices) * num_choices
    if labelled is not None:
        labelled = min(tokens, _rounded(-(-8 * labelled * tokens // (7 * max(1, batch.total_tokens))) + 8, STEP))
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
        """The smallest that holds a batch. One with more slack than its own would have is taken where there are
        enough.
        """
        wanted = bucket_for(batch, num_choices, self.limit)
        held = next((bucket for bucket in self.sizes if bucket.holds(batch)), None)
        if held is not None and (held.total_tokens <= wanted.total_tokens or len(self.sizes) >= self.most):
            return held
        if len(self.sizes) >= self.most or batch.total_tokens == 0:
            return None
        self.sizes.append(wanted)
        self.sizes.sort()
        return wanted


class Field(NamedTuple):
    """A tensor in a block: where it begins, in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def of(self, block: torch.Tensor) -> torch.Tensor:
        return block[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


class Form(NamedTuple):
    """How the batches of a bucket lie in a block of bytes. Two batches of one form can go through one graph."""

    bucket: Sizes
    num_choices: int | None
    fields: tuple[Field, ...]

    @classmethod
    def of(cls, bucket: Sizes, packed: PackedInputs) -> Form:
        """Of a batch that has its bucket's slack."""
        fields, start = [], 0
        for name, tensor in _tensors(packed).items():
            fields.append(Field(name, tensor.dtype, tuple(tensor.shape), start))
            start += -(-fields[-1].nbytes // _ALIGNED) * _ALIGNED
        return cls(bucket, packed.get("num_choices"), tuple(fields))

    @property
    def nbytes(self) -> int:
        last = self.fields[-1]
        return -(-(last.start + last.nbytes) // _ALIGNED) * _ALIGNED

    def read(self, block: torch.Tensor, bounds: Mapping[str, tuple[int, int]] | None) -> PackedInputs:
        """What lies in a block, whose memory it shares."""
        found: dict[str, Any] = {field.name: field.of(block) for field in self.fields}
        cu_seqlens, labelled = found.pop(_OFFSETS), found.pop(_LABELLED, None)
        tokens, sequences, longest, _ = self.bucket
        batch = PackedBatch(None, cu_seqlens, longest, sequences, None, tokens, labelled, bounds)
        choices = {} if self.num_choices is None else {"num_choices": self.num_choices}
        return PackedInputs({**found, "batch": batch, **choices})


class Bounds:
    """Of ids and labels, by name, the smallest and the largest that a model has compared with its tables."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[int, int]] = {}

    def hold(self, batch: Mapping[str, tuple[int, int]]) -> bool:
        seen = self.of
        return all(n in seen and seen[n][0] <= low and high <= seen[n][1] for n, (low, high) in batch.items())

    def widen(self, batch: Mapping[str, tuple[int, int]]) -> None:
        for name, (low, high) in batch.items():
            first = self.of.get(name, (low, high))
            self.of[name] = min(first[0], low), max(first[1], high)


_OFFSETS, _LABELLED = "cu_seqlens", "labelled"


def _tensors(packed: PackedInputs) -> dict[str, torch.Tensor]:
    batch: PackedBatch = packed["batch"]
    found = {name: value for name, value in packed.items() if isinstance(value, torch.Tensor)}
    found[_OFFSETS] = batch.cu_seqlens
    return found if batch.labelled is None else found | {_LABELLED: batch.labelled}


class Staged(NamedTuple):
    """A batch in a block, on its way to a graph. counts: what the loss's terms are means over; tokens: real ones."""

    form: Form
    block: torch.Tensor
    bounds: Mapping[str, tuple[int, int]]
    counts: list[int]
    tokens: int


def stage(packed: PackedInputs, bucket: Sizes, counts: Sequence[int] = (), block: torch.Tensor | None = None) -> Staged:
    """A batch on the host, with its bucket's slack, in a block of bytes: in the front of `block`, if that is given and
    large enough, else in one of its own.
    """
    tokens, (total_tokens, batch_size, max_seqlen, labelled) = packed["batch"].total_tokens, bucket
    padded = packed.with_slack(total_tokens, batch_size, labelled or 0, max_seqlen)
    form = Form.of(bucket, padded)
    if block is None or len(block) < form.nbytes:
        block = torch.empty(form.nbytes, dtype=torch.uint8)
    block = block[: form.nbytes]
    for field, tensor in zip(form.fields, _tensors(padded).values(), strict=True):
        field.of(block).copy_(tensor)
    return Staged(form, block, padded["batch"].bounds or {}, list(counts), tokens)
