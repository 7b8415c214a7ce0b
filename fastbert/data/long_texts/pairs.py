"""Texts and pairs of texts to tokens, cut as `tokenizers` cuts them, without the memory that it takes for long ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from fastbert.data.long_texts.pieces import as_far_as_needed, is_long, pieces_of, uncut
from fastbert.data.long_texts.template import Template

Text = str | tuple[str, str]  # one text, or a pair


@dataclass(frozen=True)
class CutPair:
    """What is read of the Encoding of a pair. ids, type_ids: int64 (tokens,); overflowing: whether it was cut."""

    ids: np.ndarray
    type_ids: np.ndarray
    overflowing: bool

    def __len__(self) -> int:
        return len(self.ids)


def encode(tokenizer: Tokenizer, inputs: Sequence[Text]) -> list[Encoding | CutPair]:
    """The tokens of each input, on all cores. A long text is read as far as truncation keeps it.

    Of a pair whose texts are both cut, `tokenizers` makes a sequence of each piece of the one with each of the other:
    6,399 of two texts of 1,200 tokens that are cut to 30. Pairs of two long texts are cut here.
    """
    pairs = [i for i, one in enumerate(inputs) if isinstance(one, tuple)]
    two_long = _of_two_long(tokenizer, inputs, pairs)
    apart = set(two_long)
    # The fast one gives both texts type 0 where no post-processor says otherwise.
    read_all = tokenizer.encode_batch if pairs and tokenizer.post_processor is None else tokenizer.encode_batch_fast
    made: list[Any] = read_all([_as_far_as_needed(tokenizer, one) for i, one in enumerate(inputs) if i not in apart])
    if two_long:
        for i, one in zip(two_long, _cut_pairs(tokenizer, [inputs[i] for i in two_long]), strict=True):
            made.insert(i, one)
    return made


def _is_longest_first(truncation: dict[str, Any] | None) -> bool:
    return truncation is not None and truncation["strategy"] == "longest_first"


def _of_two_long(tokenizer: Tokenizer, inputs: Sequence[Text], pairs: list[int]) -> list[int]:
    """Places of the pairs whose texts are long enough for both to be cut into many pieces."""
    truncation = tokenizer.truncation if pairs else None
    if truncation is None or not _is_longest_first(truncation):
        return []
    return [i for i in pairs if min(map(len, inputs[i])) > 2 * truncation["max_length"]]


def _as_far_as_needed(tokenizer: Tokenizer, one: Text) -> Text:
    """Of a pair, the text of more characters is shortened: what is left is still the one of more tokens, and is cut."""
    if isinstance(one, str):
        return as_far_as_needed(tokenizer, one)
    first, second = one
    if not is_long(max(len(first), len(second))) or not _is_longest_first(tokenizer.truncation):
        return one
    if len(first) > len(second):
        return as_far_as_needed(tokenizer, first, second), second
    return first, as_far_as_needed(tokenizer, second, first)


class _Reading:
    """The tokens of a text from the end that is kept, read piece by piece: `pieces` has the ids of each."""

    def __init__(self, pieces: Iterator[list[int]]):
        self.pieces, self.ids, self.tokens, self.is_whole = pieces, list[list[int]](), 0, False

    def go_on(self) -> None:
        ids = next(self.pieces, None)
        if ids is None:
            self.is_whole = True
        else:
            self.ids.append(ids)
            self.tokens += len(ids)

    def kept(self, tokens: int, direction: str) -> np.ndarray:
        """int64 (tokens,)."""
        if direction == "right":
            return np.array([one for ids in self.ids for one in ids], np.int64)[:tokens]
        return np.array([one for ids in reversed(self.ids) for one in ids], np.int64)[self.tokens - tokens :]


def _cut_pairs(tokenizer: Tokenizer, pairs: Sequence[Any]) -> Iterator[CutPair]:
    """Each pair as the tokenizer cuts it, "longest_first": the text of more tokens first, then both by turns."""
    counting, truncation = uncut(tokenizer), tokenizer.truncation or {}
    template, direction = Template.of(counting, 2), truncation["direction"]
    room = truncation["max_length"] - template.added

    def ids_of(texts: list[str]) -> list[list[int]]:
        return [one.ids for one in counting.encode_batch_fast(texts, add_special_tokens=False)]

    short = iter(ids_of([text for pair in pairs for text in pair if not is_long(len(text))]))
    for pair in pairs:
        first, second = (
            _Reading(
                (ids_of([piece])[0] for piece in pieces_of(counting, text, direction))
                if is_long(len(text))
                else iter([next(short)])
            )
            for text in pair
        )
        _read(first, second, room)
        sizes = _sizes(first.tokens, second.tokens, room)
        ids, types = template.around(first.kept(sizes[0], direction), second.kept(sizes[1], direction))
        yield CutPair(ids, types, first.tokens + second.tokens > room)


def _read(first: _Reading, second: _Reading, room: int) -> None:
    """Read both until each is whole or has more tokens than there is room for, and it is known which has more."""
    while True:
        fewer, more = sorted((first, second), key=lambda one: one.tokens)
        if not fewer.is_whole:
            fewer.go_on()
        elif not more.is_whole and more.tokens <= max(room, fewer.tokens):
            more.go_on()
        else:
            return


def _sizes(first: int, second: int, room: int) -> tuple[int, int]:
    """How many of their tokens are kept."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    if 2 * shorter > room:  # both are cut, and the text of more tokens, or the second, keeps one more
        shorter = room // 2
    return (room - shorter, shorter) if first > second else (shorter, room - shorter)
