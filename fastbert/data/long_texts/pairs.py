"""Texts and pairs of texts to tokens, cut as `tokenizers` cuts them, without the memory that it takes for long ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenizers import Encoding, Tokenizer

from fastbert.data.long_texts.pieces import as_far_as_needed, first_piece, is_long, pieces_of, uncut
from fastbert.data.long_texts.template import Template


class CutPair:
    """What is read of the Encoding of a pair: ids and types of its tokens, and whether it was cut."""

    __slots__ = ("ids", "overflowing", "type_ids")

    def __init__(self, ids: list[int], type_ids: list[int], overflowing: bool):
        self.ids, self.type_ids, self.overflowing = ids, type_ids, overflowing

    def __len__(self) -> int:
        return len(self.ids)


def encode(tokenizer: Tokenizer, inputs: Sequence[str | tuple[str, str]]) -> list[Encoding | CutPair]:
    """The tokens of each input, on all cores. A long text is read as far as truncation keeps it.

    Of a pair whose texts are both cut, `tokenizers` makes a sequence of each piece of the one with each of the other:
    6,399 of two texts of 1,200 tokens that are cut to 30. Pairs that are not short are put together here, of texts that
    are read once each: a query stands in many.
    """
    pairs = [i for i, one in enumerate(inputs) if isinstance(one, tuple)]
    ours = _not_short(tokenizer, inputs, pairs)
    apart = set(ours)
    # The fast one gives both texts type 0 where no post-processor says otherwise.
    read_all = tokenizer.encode_batch if pairs and tokenizer.post_processor is None else tokenizer.encode_batch_fast
    encodings = _read_all(tokenizer, read_all, [one for i, one in enumerate(inputs) if i not in apart])
    if ours:
        for i, one in zip(ours, _cut_pairs(tokenizer, [inputs[i] for i in ours]), strict=True):
            encodings.insert(i, one)
    return encodings


def _read_all(tokenizer: Tokenizer, read: Callable[[list[Any]], list[Any]], inputs: list[Any]) -> list[Any]:
    """Of a long text its first piece; with many characters a token this may have too few tokens, and more is read."""
    heads = [first_piece(tokenizer, one) if isinstance(one, str) else one for one in inputs]
    encodings = read(heads)
    too_short = [i for i, one in enumerate(heads) if len(one) < len(inputs[i]) and not encodings[i].overflowing]
    if too_short:
        more = read([as_far_as_needed(tokenizer, inputs[i]) for i in too_short])
        for i, one in zip(too_short, more, strict=True):
            encodings[i] = one
    return encodings


def _not_short(tokenizer: Tokenizer, inputs: Sequence[str | tuple[str, str]], pairs: list[int]) -> list[int]:
    """Places of the pairs that have more bytes than tokens are kept of them. Of the others a normalizer that writes
    signs out may make more tokens, but few pieces.
    """
    truncation = tokenizer.truncation if pairs else None
    if truncation is None or truncation["strategy"] != "longest_first":
        return []
    return [i for i in pairs if sum(len(text.encode()) for text in inputs[i]) > truncation["max_length"]]


class _Reading:
    """A text that is read piece by piece: how many tokens it has so far, and the ids of those that may be kept."""

    def __init__(self, pieces: Iterator[list[int]], direction: str, room: int):
        self.pieces, self.is_right, self.room = pieces, direction == "right", room
        self.ids, self.tokens, self.is_whole = list[int](), 0, False

    def go_on(self) -> None:
        ids = next(self.pieces, None)
        if ids is None:
            self.is_whole = True
            return
        self.tokens += len(ids)
        if len(self.ids) < self.room:
            self.ids = self.ids + ids if self.is_right else ids + self.ids
            self.ids = self.kept(self.room)

    def kept(self, tokens: int) -> list[int]:
        return self.ids[:tokens] if self.is_right else self.ids[max(0, len(self.ids) - tokens) :]


def _cut_pairs(tokenizer: Tokenizer, pairs: Sequence[Any]) -> Iterator[CutPair]:
    """Each pair as the tokenizer cuts it, "longest_first": the text of more tokens first, then both by turns."""
    counting, truncation = uncut(tokenizer), tokenizer.truncation or {}
    template, direction = Template.of(counting, 2), truncation["direction"]
    room = truncation["max_length"] - template.added
    before, between, behind = (part.tolist() for part in template.ids)
    types = [part.tolist() for part in template.types]

    def ids_of(texts: list[str]) -> list[list[int]]:
        return [one.ids for one in counting.encode_batch_fast(texts, add_special_tokens=False)]

    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    short = [text for text in texts if not is_long(len(text), room)]
    read = {text: _Reading(iter([ids]), direction, room) for text, ids in zip(short, ids_of(short), strict=True)}
    for text in texts:
        if text not in read:
            pieces = pieces_of(counting, text, direction, room)
            read[text] = _Reading((ids_of([piece])[0] for piece in pieces), direction, room)
    for pair in pairs:
        first, second = (read[text] for text in pair)
        _read(first, second, room)
        sizes = _sizes(first.tokens, second.tokens, room)
        of_types = [[type_id] * size for type_id, size in zip(template.type_of, sizes, strict=True)]
        yield CutPair(
            [*before, *first.kept(sizes[0]), *between, *second.kept(sizes[1]), *behind],
            [*types[0], *of_types[0], *types[1], *of_types[1], *types[2]],
            first.tokens + second.tokens > room,
        )


def _read(first: _Reading, second: _Reading, room: int) -> None:
    """Read both until each is whole or has more tokens than there is room for, and it is known which has more."""
    while True:
        fewer, more = (first, second) if first.tokens <= second.tokens else (second, first)
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
