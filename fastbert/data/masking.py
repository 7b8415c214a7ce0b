"""Which tokens a masked language model has to guess, and what stands there instead (Devlin et al. 2018, section 3.1).

What is masked follows from a number that each sequence brings along and from nothing else, so it is the same in any
batch, in any process and after any restart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fastbert.errors import InputError

Unit = Literal["token", "word", "span"]
UNITS = ("token", "word", "span")
IGNORED = -100  # the label of a token that is not to be guessed

# Spans of SpanBERT (Joshi et al. 2020, section 3.1) have 3.8 words on average and 10 at most. A span that ends after
# each word with this probability, and after the tenth, has that mean.
SPAN_ENDS = 0.25
SPAN_WORDS = 10

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_CHOICE, _SPAN, _KIND, _WORD = range(4)  # what a number is drawn for


def mixed(x: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, each bit depending on all bits: the finalizer of SplitMix64 (Steele, Lea & Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _FACTORS[0]
    x = (x ^ (x >> np.uint64(27))) * _FACTORS[1]
    return x ^ (x >> np.uint64(31))


def example_keys(seed: int, epoch: int, indices: Iterable[int]) -> np.ndarray:
    """uint64: the number that masks example i of a data set in an epoch, for each i of `indices`."""
    start = mixed(mixed(np.array([seed], np.uint64) + _GAMMA) + np.array([epoch], np.uint64) * _GAMMA)
    return mixed(start + np.asarray(list(indices), np.uint64) * _GAMMA)


def uniform(keys: np.ndarray, positions: np.ndarray, purpose: int) -> np.ndarray:
    """float64 in [0, 1), for each token: of its sequence's key and its position there."""
    streams = mixed(keys + np.array([purpose + 1], np.uint64) * _GAMMA)
    return (mixed(streams + positions.astype(np.uint64) * _GAMMA) >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True)
class Masking:
    """How a sequence is masked. `Masking.of(tokenizer)` fills in what the tokenizer says.

    Args:
        mask_id: the id that stands for a masked token.
        is_special: bool (vocab_size,): tokens that are never masked, and never put in the place of another.
        starts_word: bool (vocab_size,): tokens with which a word begins. Not needed if unit is "token".
        unit: what is masked as a whole: a token, a word, or a span of 1 to 10 words.
        share: of a sequence's tokens that are to be guessed, special ones not counted; of any sequence at least one.
        masked, random: of the tokens to be guessed so many become mask_id, or a random token; the others stay.
    """

    mask_id: int
    is_special: np.ndarray = field(repr=False)
    starts_word: np.ndarray | None = field(default=None, repr=False)
    unit: Unit = "token"
    share: float = 0.15
    masked: float = 0.8
    random: float = 0.1

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise InputError(f"unit is {self.unit!r}; it must be one of {', '.join(UNITS)}")
        if not 0.0 < self.share < 1.0:
            raise InputError(f"share is {self.share}; it must be above 0 and below 1")
        if min(self.masked, self.random) < 0.0 or self.masked + self.random > 1.0:
            raise InputError(
                f"masked={self.masked} and random={self.random} must be at least 0, and 1 at most together"
            )
        if not 0 <= self.mask_id < len(self.is_special):
            raise InputError(f"mask_id is {self.mask_id}; the vocabulary has {len(self.is_special)} tokens")
        if self.unit != "token" and self.starts_word is None:
            raise InputError(f"unit {self.unit!r} needs starts_word")

    @classmethod
    def of(cls, tokenizer: Any, **options: Any) -> Masking:
        """Of a tokenizer of `tokenizers` that has a mask token, or of transformers' around one. Raises InputError."""
        inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
        added = inner.get_added_tokens_decoder()
        mask = getattr(tokenizer, "mask_token", None) or next(
            (token.content for token in added.values() if token.content in ("[MASK]", "<mask>")), None
        )
        if mask is None or (mask_id := inner.token_to_id(mask)) is None:
            raise InputError("this tokenizer has no mask token")
        size = max(inner.get_vocab().values()) + 1
        is_special = np.zeros(size, bool)
        is_special[[i for i, token in added.items() if token.special]] = True
        is_special[mask_id] = True
        starts = word_starts(inner) if options.get("unit", "token") != "token" else None
        return cls(mask_id, is_special, starts, **options)

    def __call__(self, ids: np.ndarray, lengths: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mask a packed batch.

        Args:
            ids: int64 (total_tokens,). lengths: (batch,), at least 1 each. keys: uint64 (batch,), from `example_keys`.

        Returns (what the model is shown, labels), int64 (total_tokens,); the label of what is not to be guessed is
        -100. Raises InputError: an id is out of the vocabulary.
        """
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(self.is_special):
            raise InputError(
                f"input_ids holds {ids.min() if ids.min() < 0 else ids.max()}; the tokenizer has ids from 0 to"
                f" {len(self.is_special) - 1}"
            )
        row = np.repeat(np.arange(len(lengths)), lengths)
        position = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        key, candidate = keys[row], ~self.is_special[ids]
        after = np.ones(len(ids), bool)  # behind a special token, or at a sequence's beginning
        after[1:] = ~candidate[:-1] | (row[1:] != row[:-1])
        is_first = candidate if self.unit == "token" else candidate & (self._starts_word(ids) | after)
        span = position  # where the span of a token begins: each token and word is one of its own, but for spans
        if self.unit == "span":
            span = _span_starts(is_first, after, key, position)
        chosen = np.zeros(len(ids), bool)
        of = [field[candidate] for field in (is_first, row, span, key)]
        chosen[candidate] = _chosen(of[0], of[1], of[2], of[3], self.share)

        # What a span becomes is decided for the whole of it, as in SpanBERT; else for each token, as in BERT.
        at = span if self.unit == "span" else position
        draw = uniform(key, at, _KIND)
        shown = np.where(chosen & (draw < self.masked), self.mask_id, ids)
        is_random = chosen & (draw >= self.masked) & (draw < self.masked + self.random)
        words = np.flatnonzero(~self.is_special)
        drawn = (uniform(key[is_random], position[is_random], _WORD) * len(words)).astype(np.int64)
        shown[is_random] = words[drawn]
        return shown, np.where(chosen, ids, IGNORED)

    def _starts_word(self, ids: np.ndarray) -> np.ndarray:
        assert self.starts_word is not None
        return self.starts_word[ids]


def _span_starts(words: np.ndarray, after: np.ndarray, key: np.ndarray, position: np.ndarray) -> np.ndarray:
    """int64 (total_tokens,): the position at which the span of each token begins. `words`: where words begin."""
    index = np.arange(len(words))
    starts = words & ((uniform(key, position, _SPAN) < SPAN_ENDS) | after)
    nth = np.cumsum(words)
    nth = nth - nth[np.maximum.accumulate(np.where(starts, index, 0))]  # words since the span's first
    starts |= words & (nth % SPAN_WORDS == 0)
    return position[np.maximum.accumulate(np.where(starts, index, 0))]


def _chosen(first: np.ndarray, row: np.ndarray, span: np.ndarray, key: np.ndarray, share: float) -> np.ndarray:
    """Bool: which of the tokens that may be masked are to be guessed: whole units, which begin where `first` is set.

    Spans of units are taken in a random order, up to `share`. The last unit is taken if half of it still fits, so that
    the mean of many sequences is `share`; the first is always taken.
    """
    if not len(first):
        return first
    start = np.flatnonzero(first)
    unit = np.cumsum(first) - 1
    sizes, rows = np.bincount(unit), row[start]
    order = np.lexsort((start, uniform(key[start], span[start], _CHOICE), rows))
    ends = np.cumsum(sizes[order])
    new_row = np.ones(len(order), bool)
    new_row[1:] = rows[order][1:] != rows[order][:-1]
    before_row = (ends - sizes[order])[np.maximum.accumulate(np.where(new_row, np.arange(len(order)), 0))]
    budget = np.rint(share * np.bincount(row))[rows[order]]
    taken = np.zeros(len(start), bool)
    taken[order] = new_row | (ends - before_row - sizes[order] / 2 <= budget)
    return taken[unit]


def word_starts(tokenizer: Any) -> np.ndarray:
    """Bool (vocab_size,): the tokens with which a word begins, by the marks of WordPiece, byte-level BPE or Unigram.

    Raises InputError: a tokenizer without such marks.
    """
    vocab = tokenizer.get_vocab()
    starts = np.zeros(max(vocab.values()) + 1, bool)
    marks = {mark: sum(token.startswith(mark) for token in vocab) for mark in ("##", "Ġ", "▁")}
    mark = max(marks, key=lambda mark: marks[mark])
    if not marks[mark]:
        raise InputError("this tokenizer does not mark where words begin: none of its tokens begins with ##, Ġ or ▁")
    for token, i in vocab.items():
        starts[i] = token.startswith(mark) != (mark == "##")
    return starts
