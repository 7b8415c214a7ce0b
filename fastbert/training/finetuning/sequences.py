"""Tokenised inputs: ids in one row, made by `tokenizers` on all cores, and batches of them without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer

from fastbert.packed_inputs import PackedInputs, pack_inputs

CHUNK_TEXTS = 4096  # tokenised at a time: an Encoding takes much more memory than its ids
# Tokens in a batch that is evaluated, by the device: see fastbert.sentences.batches.
BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


@dataclass(frozen=True)
class Sequences:
    """Token ids of many inputs, special tokens included.

    ids: int32 (tokens,). types: uint8 (tokens,), of which text each token is; None: the model has no table for it.
    offsets: int64 (inputs + 1,), where each input begins. cut: how many were too long, and lost their end.
    """

    ids: np.ndarray = field(repr=False)
    types: np.ndarray | None = field(repr=False)
    offsets: np.ndarray = field(repr=False)
    cut: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """What goes to the model of one input."""
        place = slice(self.offsets[i], self.offsets[i + 1])
        found = {"input_ids": self.ids[place].astype(np.int64)}
        return found if self.types is None else found | {"token_type_ids": self.types[place].astype(np.int64)}

    def pack(self, indices: Sequence[int] | np.ndarray) -> PackedInputs:
        examples = [self[int(i)] for i in indices]
        return pack_inputs(**{name: [example[name] for example in examples] for name in examples[0]})


def tokenize(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    with_types: bool,
    each: Callable[[Encoding], Any] | None = None,
) -> Sequences:
    """The tokens of texts, or of pairs of texts, cut as the tokenizer's `truncation` says.

    `each`: is called with the Encoding of each input, which then has offsets.
    """
    ids, types, lengths, cut = [], [], [], 0
    longest = (tokenizer.truncation or {}).get("max_length")
    encode = tokenizer.encode_batch_fast if each is None else tokenizer.encode_batch
    for start in range(0, len(texts), CHUNK_TEXTS):
        part: Any = texts[start : start + CHUNK_TEXTS]
        if pairs is not None:
            part = list(zip(part, pairs[start : start + CHUNK_TEXTS], strict=True))
        made = encode(part)
        sizes = [len(one) for one in made]
        lengths += sizes
        ids.append(flat([one.ids for one in made], sizes, np.int32))
        if with_types:
            types.append(flat([one.type_ids for one in made], sizes, np.uint8))
        cut += sum(bool(one.overflowing) for one, size in zip(made, sizes, strict=True) if size == longest)
        if each is not None:
            for one in made:
                each(one)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Sequences(
        np.concatenate(ids) if ids else np.zeros(0, np.int32),
        (np.concatenate(types) if types else np.zeros(0, np.uint8)) if with_types else None,
        offsets,
        cut,
    )


def flat(rows: Sequence[Sequence[int]], sizes: Sequence[int], dtype: Any) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype, sum(sizes))


def budget_batches(lengths: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Indices of inputs, longest first, in groups of at most `budget` tokens, or of one input."""
    order = np.argsort(-lengths, kind="stable")
    ends, start, before = np.cumsum(lengths[order]), 0, 0
    while start < len(order):
        stop = max(start + 1, int(np.searchsorted(ends, before + budget, "right")))
        yield order[start:stop]
        start, before = stop, int(ends[stop - 1])


@torch.inference_mode()
def run_model(
    model: Any,
    sequences: Sequences,
    batch_tokens: int | None = None,
    on_batch: Callable[[int], Any] = lambda inputs: None,
) -> Iterator[tuple[np.ndarray, Any]]:
    """(the indices of a batch's inputs, the model's output for it), until all are done."""
    device = model.device
    budget = batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS["cuda"])
    for indices in budget_batches(sequences.lengths, budget):
        batch = sequences.pack(indices)
        yield indices, model(batch.to(device) if device.type != "cpu" else batch)
        on_batch(len(indices))
