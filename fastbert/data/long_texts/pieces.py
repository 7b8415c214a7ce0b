"""Long texts in pieces that are tokenised by themselves: a tokenizer takes a hundred times a text's memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice

from tokenizers import Tokenizer

PIECE_CHARS = 1 << 14  # of a long text; what is read of a piece holds up Python's other threads for milliseconds
LEAST_CHARS, CHARS_A_TOKEN = 1 << 11, 6  # of a piece of a text that is cut: its first one mostly has what is kept
CHARS_AT_ONCE = 1 << 19  # tokenised at a time: an Encoding takes a hundred times as much, until its ids are taken
AROUND = 200  # characters behind a place whose tokens are compared
BEFORE = (200, 61, 53, 47)  # and before it: rows of words of any length are begun with odd and even numbers of them
PLACES_TO_TRY = 50
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"


@cache
def _places() -> tuple[re.Pattern[str], ...]:
    """Most tokenizers take words one by one between blanks; others are before white space, around signs, between
    ideographs.
    """
    others = rf"(?<=\S)(?=\s\S)|(?<=[^\w\s])(?=\S)|(?<=\w)(?=[^\w\s])|(?<=[{_CJK}])(?=[{_CJK}])"
    return re.compile(r"(?<=\w)(?= \w)"), re.compile(others)


@cache
def _no_word() -> re.Pattern[str]:
    """A sign that is no part of a word: there is one beside each of the places."""
    return re.compile(rf"[\W{_CJK}]")


def uncut(tokenizer: Tokenizer) -> Tokenizer:
    """One that neither cuts nor pads, with the vocabulary, in the same memory, of another."""
    copy = Tokenizer(tokenizer.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor"):
        if (part := getattr(tokenizer, name)) is not None:
            setattr(copy, name, part)
    added = tokenizer.get_added_tokens_decoder()
    copy.add_tokens([added[i] for i in sorted(added)])
    if copy.get_added_tokens_decoder() != added:  # its ids are not those that new tokens get
        copy = Tokenizer.from_str(tokenizer.to_str())
        copy.no_truncation()
        copy.no_padding()
    copy.encode_special_tokens = tokenizer.encode_special_tokens  # which no tokenizer.json holds
    return copy


def piece_chars(tokens: int | None = None) -> int:
    """Characters of the pieces of a text of which so many tokens are kept, or all of them."""
    return PIECE_CHARS if tokens is None else min(PIECE_CHARS, max(LEAST_CHARS, CHARS_A_TOKEN * tokens))


def is_long(chars: int, tokens: int | None = None) -> bool:
    """Whether a text, or what is left of one, is to be parted: of which so many tokens are kept, or all of them."""
    return chars > 2 * piece_chars(tokens)


def groups(inputs: Sequence[str | tuple[str, str]], most: int) -> Iterator[slice]:
    """Texts, or pairs of texts, that are tokenised at once: `most` of them, with CHARS_AT_ONCE in different texts. Of a
    long one some pieces count: what is cut off is not read, and the rest not at once.
    """
    start, chars, texts = 0, 0, set[str]()
    for i, one in enumerate(inputs):
        for text in (one,) if isinstance(one, str) else one:
            if text not in texts:
                texts.add(text)
                chars += min(len(text), 2 * PIECE_CHARS)
        if chars >= CHARS_AT_ONCE or i + 1 - start == most or i + 1 == len(inputs):
            yield slice(start, i + 1)
            start, chars = i + 1, 0
            texts.clear()


def partings(tokenizer: Tokenizer, text: str, tokens: int | None = None) -> Iterator[int]:
    """Places at which a text can be parted into pieces with the tokens that they have in the whole text, by an `uncut`
    tokenizer. It looks at the words before and behind such a place one by one, and the tokens around it are the same in
    both ways. They end where there is no such place. tokens: how many of them are kept; None: all.
    """
    at, size = 0, piece_chars(tokens)
    while is_long(len(text) - at, tokens):
        if (parting := _parting(tokenizer, text, range(at + size, len(text), size))) is None:
            return
        yield (at := parting)


def partings_from_end(tokenizer: Tokenizer, text: str, tokens: int | None = None) -> Iterator[int]:
    """As `partings`, the last one first."""
    at, size = len(text), piece_chars(tokens)
    while is_long(at, tokens):
        if (parting := _parting(tokenizer, text, range(at - size, size, -size))) is None:
            return
        yield (at := parting)


def pieces_of(tokenizer: Tokenizer, text: str, direction: str = "right", tokens: int | None = None) -> Iterator[str]:
    """A text in pieces that have the tokens of the whole, by an `uncut` tokenizer: from the end that truncation on the
    right keeps, its first, or, on the left, from its last. tokens: how many of them are kept; None: all.
    """
    if direction == "right":
        at = 0
        for stop in partings(tokenizer, text, tokens):
            yield text[at:stop]
            at = stop
        yield text[at:]
        return
    at = len(text)
    for start in partings_from_end(tokenizer, text, tokens):
        yield text[start:at]
        at = start
    yield text[:at]


def first_piece(tokenizer: Tokenizer, text: str) -> str:
    """Of a long text what the tokenizer's truncation keeps, mostly: if it cuts this, too, it cuts it as the whole."""
    if (kept := _kept_of_long(tokenizer, text)) is None:
        return text
    return next(pieces_of(uncut(tokenizer), text, *kept))


def as_far_as_needed(tokenizer: Tokenizer, text: str) -> str:
    """A text, if it is long without what the tokenizer's truncation cuts off anyway: what is left has more tokens than
    a sequence may have.
    """
    if (kept := _kept_of_long(tokenizer, text)) is None:
        return text
    (direction, most), counting, chars, tokens = kept, uncut(tokenizer), 0, 0
    for piece in pieces_of(counting, text, direction, most):
        chars += len(piece)
        if chars == len(text):  # nothing is behind it, and to count it would be to tokenise it twice
            break
        tokens += _count(counting, piece)
        if tokens > most:
            break
    return text[:chars] if direction == "right" else text[len(text) - chars :]


def _kept_of_long(tokenizer: Tokenizer, text: str) -> tuple[str, int] | None:
    """At which side and how many tokens are kept of a text that is long beside them; None: it is not, or all are."""
    truncation = tokenizer.truncation if is_long(len(text), 0) else None
    if truncation is None or not is_long(len(text), truncation["max_length"]):
        return None
    return truncation["direction"], truncation["max_length"]


def _count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])


def _parting(tokenizer: Tokenizer, text: str, starts: range) -> int | None:
    """The first place at which the text can be parted, in the characters of a piece behind each of `starts`: between
    words if there is one there.
    """
    pre_tokenizer = tokenizer.pre_tokenizer
    if pre_tokenizer is None or len(pre_tokenizer.pre_tokenize_str("ab cd")) < 2:
        return None
    tries, size = [PLACES_TO_TRY] * len(_places()), abs(starts.step)
    for start in starts:  # so many characters at a time: a search holds up Python's other threads
        stop = min(start + size + 2, len(text))  # a place is told by two characters behind it
        if not _no_word().search(text, start - 1, stop):
            continue
        for i, places in enumerate(_places()):
            for match in islice(places.finditer(text, start, stop), tries[i]):
                if match.start() >= start + size:  # of the next part
                    break
                if _is_parted(tokenizer, text, match.start()):
                    return match.start()
                tries[i] -= 1
    return None


def _is_parted(tokenizer: Tokenizer, text: str, at: int) -> bool:
    """Whether the tokenizer looks at the words before and behind `at` one by one, and parts have the same tokens.

    Equal tokens alone do not tell: of a long row of the same sign it depends on where it begins which of them are one
    token. An added token may have several words, which is why several begins are tried.
    """
    right, lefts = text[at : at + AROUND], [text[max(0, at - chars) : at] for chars in BEFORE]
    if _words(tokenizer, lefts[0] + right) != _words(tokenizer, lefts[0]) + _words(tokenizer, right):
        return False
    texts = [right, *(part for left in lefts for part in (left, left + right))]
    behind, *others = tokenizer.encode_batch(texts, add_special_tokens=False)
    for left, before, whole in zip(lefts, others[::2], others[1::2], strict=True):
        offsets = before.offsets + [(a + len(left), b + len(left)) for a, b in behind.offsets]
        if whole.ids != before.ids + behind.ids or whole.offsets != offsets:
            return False
    return True


def _words(tokenizer: Tokenizer, text: str) -> list[str]:
    normalizer = tokenizer.normalizer
    normal = text if normalizer is None else normalizer.normalize_str(text)
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]
