"""The texts of training steps with masked words: a step's lengths, its tokens, and the same batch packed and padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

import fastbert
from fastbert.packed_inputs import PackedInputs
from fastbert.testing.cases import RAGGED_32

LABELLED = 0.15  # of all tokens
SMALLEST_ID, NO_LABEL = 5, -100
# Tokens a step, at most. What targets ask for comes first, and last what may be more than the memory holds.
SIZES = {"16k": 16384, "4k": 4096, "1k": 1024, "64k": 65536}
KINDS = ("ragged", "full")
BATCHES = tuple(f"{size} {kind}" for size in SIZES for kind in KINDS)


def shrunk(length: int) -> int:
    """A length for smoke tests."""
    return max(1, length // 16)


def lengths_of(batch: str, smoke: bool) -> list[int]:
    """Ragged: those of RAGGED_32, again and again; full: 512 each, or 128 where a step is small."""
    size, kind = batch.split()
    total = SIZES[size] // (64 if smoke else 1)
    length = 128 if size == "1k" else 512
    if kind == "full":
        length = shrunk(length) if smoke else length
        return [length] * (total // length)
    found: list[int] = []
    while True:
        length = RAGGED_32.lengths[len(found) % len(RAGGED_32.lengths)]
        length = shrunk(length) if smoke else length
        if sum(found) + length > total:
            return found
        found.append(length)


class Texts(NamedTuple):
    """A list of tensors (length,) each: ids, and labels, NO_LABEL where a token has none."""

    ids: list[torch.Tensor]
    labels: list[torch.Tensor]

    @classmethod
    def draw(cls, lengths: Sequence[int], vocab_size: int, seed: int, labelled: float = LABELLED) -> Texts:
        """In an order, with ids and labels that go by the seed. The smallest and the largest are in all of them: ids
        beyond those that a captured step has seen are compared with the model's tables, op by op.
        """
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(lengths), generator=generator).tolist()
        total = sum(lengths)
        ids = torch.randint(SMALLEST_ID, vocab_size, (total,), generator=generator)
        ids[-1], ids[0] = SMALLEST_ID, vocab_size - 1
        has_label = torch.rand(total, generator=generator) < labelled
        has_label[0], has_label[-1] = True, False
        labels = ids.where(has_label, NO_LABEL)
        cuts = [lengths[i] for i in order]
        return cls(list(ids.split(cuts)), list(labels.split(cuts)))

    @property
    def num_labels(self) -> int:
        return sum(int((row != NO_LABEL).sum()) for row in self.labels)

    def packed(self) -> PackedInputs:
        return fastbert.pack_inputs([row.tolist() for row in self.ids], labels=[row.tolist() for row in self.labels])

    def padded(self) -> dict[str, torch.Tensor]:
        """Without a mask where there is no padding: transformers' fastest."""
        found = {
            "input_ids": pad_sequence(self.ids, batch_first=True),
            "labels": pad_sequence(self.labels, batch_first=True, padding_value=NO_LABEL),
        }
        lengths = torch.tensor([len(row) for row in self.ids])
        if int(lengths.min()) < int(lengths.max()):
            found["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        return found
