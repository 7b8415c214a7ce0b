"""From texts to a model, the one way: tokenised on all cores, packed by a budget of tokens, computed batch by batch.

Vectors, scores, labels, answers, evaluation during training and the server are what is made of a batch's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert.data.budget import batch_tokens_of, token_batches
from fastbert.packed_inputs import PackedInputs, pack_inputs
from fastbert.packing import PackedBatch

CHUNK_TEXTS = 4096  # tokenised at a time, at most
CHUNK_INPUTS = 1024  # that share batches: those of a long file are the same, read whole or so many at a time

Text = str | tuple[str, str]  # one text, or a pair
Output = TypeVar("Output")


@dataclass(frozen=True)
class Tokenized:
    """Token ids of many inputs, special tokens included. An input is one sequence, or several (windows.py).

    ids: int32 (tokens,). types: uint8 (tokens,), of which text each token is; None: the model has no table for it.
    offsets: int64 (sequences + 1,), where each sequence begins. source: int64 (sequences,), which input it is of.
    cut: which inputs were too long, and lost their end. query_only: uint8 (tokens,), 1 where a token attends and
    nothing attends to it; None: there are none.
    """

    ids: np.ndarray = field(repr=False)
    types: np.ndarray | None = field(repr=False)
    offsets: np.ndarray = field(repr=False)
    source: np.ndarray = field(repr=False)
    cut: Sequence[int] = ()
    query_only: np.ndarray | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def of_token(self) -> np.ndarray:
        """Which sequence each token is in, (tokens,)."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """What goes to the model of one sequence, int64 (tokens,) each."""
        i = range(len(self))[i]  # raises IndexError
        span = slice(self.offsets[i], self.offsets[i + 1])
        fields = {"input_ids": self.ids[span].astype(np.int64)}
        if self.query_only is not None:
            fields["query_only_mask"] = self.query_only[span]
        return fields if self.types is None else fields | {"token_type_ids": self.types[span].astype(np.int64)}

    def pack(self, indices: Iterable[int]) -> PackedInputs:
        return pack([self[i] for i in indices])


def pack(sequences: Sequence[Mapping[str, Any]]) -> PackedInputs:
    """One batch of sequences, which may be of several Tokenized."""
    return pack_inputs(**{name: [one[name] for one in sequences] for name in sequences[0]})


def tokenize(tokenizer: Tokenizer, inputs: Sequence[Text], *, with_types: bool) -> Tokenized:
    """The tokens of texts, or of pairs of texts, cut to the length that the tokenizer's `truncation` allows."""
    from fastbert.data.long_texts.pairs import encode  # here, as below: `import fastbert` does without it
    from fastbert.data.long_texts.pieces import groups

    ids, types, lengths, cut = [], [], list[int](), list[int]()
    longest = (tokenizer.truncation or {}).get("max_length")
    for group in groups(inputs, CHUNK_TEXTS):
        encodings = encode(tokenizer, inputs[group])
        cut += [i for i, one in enumerate(encodings, group.start) if len(one) == longest and one.overflowing]
        sizes = [len(one) for one in encodings]
        total = sum(sizes)
        lengths += sizes
        ids.append(_flat((one.ids for one in encodings), np.int32, total))
        if with_types:
            types.append(_flat((one.type_ids for one in encodings), np.uint8, total))
    return Tokenized(
        _joined(ids, np.zeros(0, np.int32)),
        _joined(types, np.zeros(0, np.uint8)) if with_types else None,
        np.fromiter(accumulate(lengths, initial=0), np.int64, len(lengths) + 1),
        np.arange(len(lengths)),
        cut=cut,
    )


def tokenize_one(tokenizer: Tokenizer, one: Text, *, with_types: bool) -> PackedInputs:
    """The batch of one text, or of one pair: what Tokenized.pack makes of it, without what many of them need."""
    from fastbert.data.long_texts.pairs import encode

    encoding = encode(tokenizer, [one])[0]
    ids = encoding.ids
    # By NumPy: torch.tensor takes twice the time, 8 microseconds more where nothing is in a cache.
    fields: dict[str, Any] = {"input_ids": torch.from_numpy(np.array(ids, np.int64))}
    if with_types:
        fields["token_type_ids"] = torch.from_numpy(np.array(encoding.type_ids, np.int64))
    fields["batch"] = _batch_of_one(len(ids))
    return PackedInputs(fields)


@lru_cache(maxsize=1024)
def _batch_of_one(tokens: int) -> PackedBatch:
    with torch.inference_mode(False):  # its tensor serves calls of every mode
        return PackedBatch(None, torch.tensor((0, tokens), dtype=torch.int32), tokens, 1, None, tokens)


def _flat(rows: Iterable[Iterable[Any]], dtype: Any, total: int) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype, total)


def _joined(parts: list[np.ndarray], empty: np.ndarray) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else empty


@torch.inference_mode()
def run_batches(
    compute: Callable[[PackedInputs], Output],
    tokenized: Tokenized,
    device: torch.device,
    batch_tokens: int | None = None,
    batch_size: int | None = None,
    *,
    share: int | None = None,
    on_batch: Callable[[int], Any] = lambda sequences: None,
) -> Iterator[tuple[np.ndarray, Output]]:
    """(the places of a batch's sequences, int64, and what `compute` gives for it), the longest sequences first.

    A batch has at most `batch_tokens` tokens (None: as many as `device` is fastest with) and `batch_size` sequences, or
    one sequence. `share`: only the sequences of so many inputs that follow each other share batches. With CHUNK_INPUTS
    an evaluation of a file has the batches of `fastbert predict`, and the same bits: with torch's products, and GPUs',
    the last ones depend on how many rows there are. `on_batch(sequences)` is called after each batch.
    """
    budget = batch_tokens or batch_tokens_of(device)
    inputs = int(tokenized.source[-1]) + 1 if len(tokenized) else 0
    cuts = np.searchsorted(tokenized.source, range(0, inputs + share, share)).tolist() if share else [0, len(tokenized)]
    lengths = tokenized.lengths
    for start, stop in pairwise(cuts):
        for indices in token_batches(lengths[start:stop], budget, batch_size):
            places = start + np.array(indices)
            batch = tokenized.pack(places)
            yield places, compute(batch if device.type == "cpu" else batch.to(device))
            on_batch(len(indices))
