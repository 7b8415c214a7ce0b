"""Tokenised inputs: ids in one row, made by `tokenizers` on all cores, and batches of them without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert.data.budget import batch_tokens_of, token_batches
from fastbert.packed_inputs import PackedInputs, pack_inputs

CHUNK_INPUTS = 1024  # that share batches: those of a long file are the same, read whole or so many at a time
CHUNK_TEXTS = 4096  # tokenised at a time: an Encoding takes much more memory than its ids


@dataclass(frozen=True)
class Sequences:
    """Token ids of many inputs, special tokens included. An input is one sequence, or several that overlap (windows).

    ids: int32 (tokens,). types: uint8 (tokens,), of which text each token is; None: the model has no table for it.
    offsets: int64 (sequences + 1,), where each sequence begins. source: int64 (sequences,), which input it is of.
    spans: int32 (tokens, 2), the characters of the last text that each token stands for, -1 for tokens of no character
    of it; None: nobody asked. cut: how many inputs were too long, and lost their end.
    """

    ids: np.ndarray = field(repr=False)
    types: np.ndarray | None = field(repr=False)
    offsets: np.ndarray = field(repr=False)
    source: np.ndarray = field(repr=False)
    spans: np.ndarray | None = field(default=None, repr=False)
    cut: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def of_token(self) -> np.ndarray:
        """Which sequence each token is in, (tokens,)."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """What goes to the model of one sequence."""
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
    windows: bool = False,
    with_spans: bool = False,
) -> Sequences:
    """The tokens of texts, or of pairs of texts, as long as the tokenizer's `truncation` allows: longer ones are cut,
    or go on in further `windows`, which overlap by its stride.
    """
    ids, types, lengths, source, spans, cut = [], [], list[int](), list[int](), [], 0
    longest = (tokenizer.truncation or {}).get("max_length")
    encode = tokenizer.encode_batch if with_spans else tokenizer.encode_batch_fast
    for start in range(0, len(texts), CHUNK_TEXTS):
        part: Any = texts[start : start + CHUNK_TEXTS]
        if pairs is not None:
            part = list(zip(part, pairs[start : start + CHUNK_TEXTS], strict=True))
        made, of = encode(part), list(range(start, start + len(part)))
        if windows:
            of = [i for i, one in zip(of, made, strict=True) for _ in range(1 + len(one.overflowing))]
            made = [window for one in made for window in (one, *one.overflowing)]
        else:
            cut += sum(len(one) == longest and bool(one.overflowing) for one in made)
        sizes = [len(one) for one in made]
        total = sum(sizes)
        lengths += sizes
        source += of
        ids.append(_flat((one.ids for one in made), np.int32, total))
        if with_types:
            types.append(_flat((one.type_ids for one in made), np.uint8, total))
        if with_spans:
            last = 0 if pairs is None else 1
            found = _flat((chain.from_iterable(one.offsets) for one in made), np.int32, 2 * total).reshape(-1, 2)
            is_text = _flat(((s == last for s in one.sequence_ids) for one in made), bool, total)
            spans.append(np.where(is_text[:, None] & (found[:, 1:] > found[:, :1]), found, -1))
    return Sequences(
        _joined(ids, np.zeros(0, np.int32)),
        _joined(types, np.zeros(0, np.uint8)) if with_types else None,
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.array(source, np.int64),
        _joined(spans, np.zeros((0, 2), np.int32)) if with_spans else None,
        cut,
    )


def _flat(rows: Iterable[Iterable[Any]], dtype: Any, total: int) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype, total)


def _joined(parts: list[np.ndarray], empty: np.ndarray) -> np.ndarray:
    return np.concatenate(parts) if parts else empty


@torch.inference_mode()
def run_model(
    model: Any,
    sequences: Sequences,
    batch_tokens: int | None = None,
    on_batch: Callable[[int], Any] = lambda inputs: None,
) -> Iterator[tuple[np.ndarray, Any]]:
    """(the indices of a batch's sequences, the model's output for it), until all are done.

    A batch has sequences of CHUNK_INPUTS inputs that follow each other, so an evaluation of a file has the batches that
    `fastbert predict` has, and the same bits: in float32 the last ones of a product depend on how many rows it has.
    """
    device = model.device
    budget = batch_tokens or batch_tokens_of(device)
    inputs = int(sequences.source[-1]) + 1 if len(sequences) else 0
    cuts = np.searchsorted(sequences.source, range(0, inputs + CHUNK_INPUTS, CHUNK_INPUTS))
    for start, stop in pairwise(cuts.tolist()):
        for indices in token_batches(sequences.lengths[start:stop], budget):
            places = start + np.array(indices)
            batch = sequences.pack(places)
            yield places, model(batch.to(device) if device.type != "cpu" else batch)
            on_batch(len(indices))
