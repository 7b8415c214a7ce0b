"""Long texts in pieces that are tokenised by themselves: a tokenizer takes a hundred times a text's memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from tokenizers import Tokenizer

PIECE_CHARS = 1 << 14  # of a long text; what is read of a piece holds up Python's other threads for milliseconds
AROUND = 200  # characters on each side of a blank whose tokens are compared
PLACES_TO_TRY = 50
_BLANK = re.compile(r"(?<=\w) (?=\w)")


def uncut(tokenizer: Tokenizer) -> Tokenizer:
    """One that neither cuts nor pads, with the vocabulary, in the same memory, of another."""
    made = Tokenizer(tokenizer.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor"):
        if (part := getattr(tokenizer, name)) is not None:
            setattr(made, name, part)
    added = tokenizer.get_added_tokens_decoder()
    made.add_tokens([added[i] for i in sorted(added)])
    if made.get_added_tokens_decoder() != added:  # its ids are not those that new tokens get
        made = Tokenizer.from_str(tokenizer.to_str())
        made.no_truncation()
        made.no_padding()
    return made


def is_long(chars: int) -> bool:
    """Whether a text, or what is left of one, is to be parted."""
    return chars > 2 * PIECE_CHARS


def partings(tokenizer: Tokenizer, text: str) -> Iterator[int]:
    """Places at which a text can be parted into pieces with the tokens that they have in the whole text, by an `uncut`
    tokenizer. These are blanks, if the tokenizer looks at the words before and behind a blank one by one; and each time
    it is looked whether the tokens around it are the same. They end where there is no such blank.
    """
    at = 0
    while is_long(len(text) - at) and (found := _parting(tokenizer, text, at + PIECE_CHARS)) is not None:
        yield (at := found)


def partings_from_end(tokenizer: Tokenizer, text: str) -> Iterator[int]:
    """As `partings`, the last one first."""
    at = len(text)
    while is_long(at) and (found := _parting(tokenizer, text, at - PIECE_CHARS)) is not None and found < at:
        yield (at := found)


def pieces_of(tokenizer: Tokenizer, text: str, direction: str = "right") -> Iterator[str]:
    """A text in pieces that have the tokens of the whole, by an `uncut` tokenizer: from the end that truncation on the
    right keeps, its first, or, on the left, from its last.
    """
    if direction == "right":
        at = 0
        for stop in partings(tokenizer, text):
            yield text[at:stop]
            at = stop
        yield text[at:]
        return
    at = len(text)
    for start in partings_from_end(tokenizer, text):
        yield text[start:at]
        at = start
    yield text[:at]


def as_far_as_needed(tokenizer: Tokenizer, text: str, other: str = "") -> str:
    """A text, if it is long without what the tokenizer's truncation cuts off anyway: what is left has more tokens than
    a sequence may have, and than the `other` text of its pair.
    """
    if not is_long(len(text)) or (truncation := tokenizer.truncation) is None:
        return text
    counting, chars, tokens = uncut(tokenizer), 0, 0
    most = max(truncation["max_length"], _count(counting, other))
    for piece in pieces_of(counting, text, truncation["direction"]):
        chars += len(piece)
        tokens += _count(counting, piece)
        if tokens > most:
            break
    return text[:chars] if truncation["direction"] == "right" else text[len(text) - chars :]


def _count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])


def _parting(tokenizer: Tokenizer, text: str, after: int) -> int | None:
    """The first blank behind `after` at which the text can be parted."""
    pre_tokenizer = tokenizer.pre_tokenizer
    if pre_tokenizer is None or len(pre_tokenizer.pre_tokenize_str("ab cd")) < 2:
        return None
    for found in islice(_BLANK.finditer(text, after), PLACES_TO_TRY):
        at = found.start()
        left, right = text[at - AROUND : at], text[at : at + AROUND]
        whole, before, behind = tokenizer.encode_batch([left + right, left, right], add_special_tokens=False)
        offsets = before.offsets + [(a + len(left), b + len(left)) for a, b in behind.offsets]
        if whole.ids == before.ids + behind.ids and whole.offsets == offsets:
            return at
    return None
