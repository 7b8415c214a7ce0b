"""Texts that are longer than a model: chunks of their tokens, which overlap, and which tokens of a chunk count.

A chunk has the special tokens of a text, and goes to the model as a text by itself. Of the tokens that two chunks
have in common each is in the *core* of one of them, the one in which it is farther from the cut: what counts every
token of a text once goes by cores. `TokenChunks.parts` says of each token what it is: OUTSIDE of the text (a special
token, one of a prompt or of a question), of the OVERLAP that is another chunk's, or of the CORE.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from tokenizers import Tokenizer, processors

from fastbert.data.long_texts.pieces import CHARS_AT_ONCE, is_long, partings, uncut
from fastbert.data.long_texts.template import Template
from fastbert.data.tokenized import Tokenized
from fastbert.errors import InputError

Pool = Literal["mean", "max", "top3", "first"]
OUTSIDE, OVERLAP, CORE = range(3)
POOLS = ("mean", "max", "top3", "first")
TEXTS_AT_ONCE = 1024  # tokenised at a time, at most
# Called with the number of chunks so far, and of tokens in them, before a text's are built: where it raises, none is.
# A server sets it for the request of a thread.
CHECK: ContextVar[Callable[[int, int], None]] = ContextVar("CHECK", default=lambda windows, tokens: None)
_BLANK_TOKENS = ("\u2581", "\u0120")  # of a blank alone, in SentencePiece's and in byte-level vocabularies
_IS_BLANK = np.array([chr(i).isspace() for i in range(0x3002)])  # the last one stands for all that are behind it


@dataclass(frozen=True)
class Windows:
    """How texts that are longer than a model are cut.

    length: tokens of a chunk, special ones included; None: as many as the model takes. overlap: tokens that a chunk
    has in common with the one before; below 1, as a share of `length`. pool: what one vector, or score, of a text is,
    of those of its windows: their mean, in which each counts by its tokens without the overlap, so that all tokens
    count alike; their maximum in each dimension; the mean of the three highest scores; or that of the first chunk
    alone. None: the maximum for a Reranker (a text is as good as its best passage), and else the mean. limit: chunks
    of a text, at most; what is left out is warned of. at: where chunks end, at "tokens", or at ends of "sentences" as
    far as one is in reach (Unicode's rules, UAX 29); then they overlap by whole sentences, by `overlap` at most.

    Raises InputError: a value is out of bounds.
    """

    length: int | None = None
    overlap: float = 0.25
    pool: Pool | None = None
    limit: int | None = None
    at: Literal["tokens", "sentences"] = "tokens"

    def __post_init__(self) -> None:
        for name, known in (("pool", POOLS), ("at", ("tokens", "sentences"))):
            if getattr(self, name) not in (*known, *([None] if name == "pool" else [])):
                raise InputError(f"{name} of windows is {getattr(self, name)!r}; there are {', '.join(known)}")
        for name in ("length", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} of windows is {value}; it must be at least 1")
        if not (0 <= self.overlap < 1 or (self.overlap >= 1 and self.overlap % 1 == 0)):  # nor NaN
            raise InputError(f"overlap of windows is {self.overlap}; it is a share below 1, or a number of tokens")

    def tokens(self, longest: int) -> tuple[int, int]:
        """(length, overlap) in tokens, of a model that takes `longest`. Raises InputError: a chunk is longer."""
        length = longest if self.length is None else self.length
        if length > longest:
            raise InputError(f"length of windows is {length}; this model takes {longest} tokens")
        return length, int(self.overlap * length) if self.overlap < 1 else int(self.overlap)

    def combined(self, rows: np.ndarray, chunks: TokenChunks) -> np.ndarray:
        """One row a text, of its chunks' rows (chunks, width): (texts, width) in double precision. A text of one
        chunk keeps its numbers.
        """
        first = np.flatnonzero(np.diff(chunks.source, prepend=-1))
        if self.pool == "first":
            return rows[first].astype(np.float64)
        if self.pool == "max":
            return np.maximum.reduceat(rows, first, axis=0).astype(np.float64)
        if self.pool == "top3":
            of_texts = np.split(rows, first[1:])
            return np.stack([np.sort(one, axis=0)[-3:].mean(0, dtype=np.float64) for one in of_texts])
        counts = np.bincount(chunks.of_token, weights=chunks.parts != OVERLAP, minlength=len(chunks))[:, None]
        counts = np.maximum(counts, 1)  # of a text without a token, which has no special ones either
        return np.add.reduceat(rows * counts, first, axis=0) / np.add.reduceat(counts, first, axis=0)


@dataclass(frozen=True)
class TokenChunks(Tokenized):
    """The chunks of texts, in order; `source` says which text each is of.

    spans: int32 (tokens, 2), the characters of the text that each token stands for, without white space at their ends;
    -1 for tokens of none. A blank that is a token by itself, before a word, stands for the word's first character: the
    tokenizer has made a part of the word of it. What the tokenizer has taken off a character (an accent, a variation
    selector: UAX 29's clusters) is in the span of the character's last token. parts: uint8 (tokens,), what each token
    is: OUTSIDE, OVERLAP or CORE.
    begins: int64 (chunks,), how many tokens of its text stand before a chunk's.
    """

    spans: np.ndarray = field(kw_only=True, repr=False)
    parts: np.ndarray = field(kw_only=True, repr=False)
    begins: np.ndarray = field(kw_only=True, repr=False)

    def part(self, start: int, stop: int) -> TokenChunks:
        """Chunks `start` to `stop` alone."""
        tokens = slice(int(self.offsets[start]), int(self.offsets[stop]))
        return TokenChunks(
            self.ids[tokens],
            None if self.types is None else self.types[tokens],
            self.offsets[start : stop + 1] - self.offsets[start],
            self.source[start:stop],
            spans=self.spans[tokens],
            parts=self.parts[tokens],
            begins=self.begins[start:stop],
        )

    @property
    def positions(self) -> np.ndarray:
        """Which one of its text's tokens each token is, in every chunk that it is in: int64 (tokens,), -1 OUTSIDE."""
        in_text, of_token = self.parts != OUTSIDE, self.of_token
        before = np.append(0, np.cumsum(in_text))  # tokens of texts before each token
        numbers = before[:-1] - before[self.offsets[:-1]][of_token] + self.begins[of_token]
        return np.where(in_text, numbers, -1)

    @property
    def of_texts(self) -> list[np.ndarray]:
        """The chunks of each text."""
        return np.split(np.arange(len(self)), np.flatnonzero(np.diff(self.source)) + 1) if len(self) else []

    @property
    def characters(self) -> np.ndarray:
        """Where the chunks begin and end in their texts, by their tokens: int64 (chunks, 2); -1, -1 without one."""
        bounds, of_token = np.full((len(self), 2), -1, np.int64), self.of_token
        tokens = np.flatnonzero(self.spans[:, 0] >= 0)
        first = tokens[np.diff(of_token[tokens], prepend=-1) > 0]
        last = tokens[np.diff(of_token[tokens], append=len(self)) > 0]
        bounds[of_token[first]] = np.stack((self.spans[first, 0], self.spans[last, 1]), 1)
        return bounds


class Ranges(NamedTuple):
    """Of a text's tokens: which go into each chunk, and which of these are its core: int64 (chunks,) each."""

    starts: np.ndarray
    stops: np.ndarray
    core_starts: np.ndarray
    core_stops: np.ndarray


def ranges_of(count: int, room: int, overlap: int, limit: int | None = None) -> Ranges:
    """Chunks of at most `room` of a text's `count` tokens, as `return_overflowing_tokens` cuts them; at least one."""
    step = room - overlap
    windows = 1 + max(0, -(-(count - room) // step))
    starts = np.arange(windows if limit is None else min(windows, limit)) * step
    stops = np.minimum(starts + room, count)
    return Ranges(starts, stops, *cores(starts, stops))


def ranges_at(
    sentences: np.ndarray, words: np.ndarray, count: int, room: int, overlap: int, limit: int | None = None
) -> Ranges:
    """Chunks that end before the last token in reach that begins a sentence, or else a word, or else anywhere. The
    next one begins with the first sentence that does so among the last `overlap` tokens.
    """
    starts, stops, start = [], [], 0
    while True:
        starts.append(start)
        stop = min(start + room, count)
        if stop < count:
            lasts = (places[np.searchsorted(places, stop, "right") - 1] for places in (sentences, words) if len(places))
            stop = next((int(last) for last in lasts if start < last <= stop), stop)
        stops.append(stop)
        if stop == count or len(stops) == limit:
            break
        following = sentences[np.searchsorted(sentences, max(stop - overlap, start + 1)) :]
        start = min([int(each) for each in following[:1]] + [stop])
    return Ranges(np.array(starts), np.array(stops), *cores(np.array(starts), np.array(stops)))


def sentences_of(text: str) -> np.ndarray:
    """Where the sentences of a text begin, in characters, int64; a piece without a letter or a digit begins none."""
    from unicode_segmentation_rs import unicode_sentences

    begins, at = [], 0
    for sentence in unicode_sentences(text):
        at = text.index(sentence, at)
        begins.append(at)
        at += len(sentence)
    return np.array(begins, np.int64)


def cores(starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(starts, stops) of the cores of chunks, each of which begins and ends behind the one before it. A token as far
    from the end of one as from the begin of the next is in the first one's.
    """
    between = (stops[:-1] + starts[1:] + 1) // 2
    return np.append(starts[:1], between), np.append(between, stops[-1:])


class Cutter:
    """Cuts texts, each by itself or behind a short text of its own (a question, a prompt), into windows.

    Args:
        tokenizer: is not changed. length, overlap: of chunks, in tokens. with_types: whether the model is told which
        token is of which text. limit: chunks of a text, at most; what is left out is warned of, unless `quietly`. at:
        as of `Windows`.

    Raises InputError: the special tokens leave no room, or the overlap is as long as what is left.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        length: int,
        overlap: int,
        *,
        with_types: bool = False,
        limit: int | None = None,
        quietly: bool = False,
        at: str = "tokens",
    ):
        self.tokenizer = uncut(tokenizer)
        self.template, self.of_pairs = Template.of(self.tokenizer, 1), Template.of(self.tokenizer, 2)
        # What is left of a post-processor without special tokens trims spans: of a blank that the tokenizer has put
        # before a word it takes the word's first letter.
        self.tokenizer.post_processor = processors.Sequence([])
        self._blanks = [i for i in map(self.tokenizer.token_to_id, _BLANK_TOKENS) if i is not None]
        self.with_types, self.limit, self.quietly = with_types, limit, quietly
        self.length, self.overlap, self.at = length, overlap, at
        self.room(self.template, 0)

    def room(self, template: Template, before: int) -> int:
        """Tokens of a text in a chunk that has `before` tokens of another one."""
        room = self.length - template.added - before
        if room < 1 or not 0 <= self.overlap < room:
            others = f"{template.added} special tokens" + (f" and {before} of another text" if before else "")
            may = f"may overlap by 0 to {room - 1}, not by {self.overlap}" if room > 0 else "have no room for a text"
            raise InputError(f"chunks of {self.length} tokens, {others} among them, {may}")
        return room

    def cut(
        self, texts: Sequence[str], before: Sequence[np.ndarray | None] | None = None, prompt: str = ""
    ) -> TokenChunks:
        """The chunks of texts, in order. A text is the second one of a pair, the ids of whose first one are in
        `before`; or it is by itself (None), behind the tokens of `prompt`. `spans` are of the texts.
        """
        ids, types, spans, parts = [], [], [], []
        sizes, source, begins = list[int](), list[int](), list[int]()
        left_out, tokens_left_out, in_all = list[int](), 0, 0
        firsts: Sequence[np.ndarray | None] = [None] * len(texts) if before is None else before
        prompts = [prompt if first is None else "" for first in firsts]
        for i, (tokens, places) in enumerate(self.read([p + text for p, text in zip(prompts, texts, strict=True)])):
            prefix = firsts[i]
            first, template = (tokens[:0], self.template) if prefix is None else (prefix, self.of_pairs)
            if prompts[i]:
                of_prompt = int(np.argmax(np.append(places[:, 1] > len(prompt), True)))
                first, tokens, places = tokens[:of_prompt], tokens[of_prompt:], places[of_prompt:]
                places = np.where(places >= 0, np.maximum(places - len(prompt), 0), -1)
            places = self._trimmed(texts[i], tokens, places)
            ranges = self.ranges(texts[i], places, self.room(template, len(first)))
            if (missing := len(tokens) - int(ranges.stops[-1])) > 0:
                left_out.append(i)
                tokens_left_out += missing
            in_all += int((ranges.stops - ranges.starts + template.added + len(first)).sum())
            CHECK.get()(len(source) + len(ranges.starts), in_all)
            for start, stop, core_start, core_stop in zip(*(each.tolist() for each in ranges), strict=True):
                own = tokens[start:stop]
                chunk, type_ids = template.around(*([np.concatenate((first, own))] if prefix is None else [first, own]))
                at = len(chunk) - len(template.ids[-1]) - len(own)  # of the text's first token
                ids.append(chunk.astype(np.int32))
                types.append(type_ids.astype(np.uint8))
                sizes.append(len(chunk))
                source.append(i)
                begins.append(start)
                spans.append(np.full((len(chunk), 2), -1, np.int32))
                spans[-1][at : at + len(own)] = places[start:stop]
                parts.append(np.full(len(chunk), OUTSIDE, np.uint8))
                parts[-1][at : at + len(own)] = OVERLAP
                parts[-1][at + core_start - start : at + core_stop - start] = CORE
        if left_out and not self.quietly:
            warnings.warn(
                f"fastbert: {len(left_out):,} of {len(texts):,} texts have more than limit={self.limit} chunks; their"
                f" last {tokens_left_out:,} tokens are left out",
                stacklevel=2,
            )
        return TokenChunks(
            _joined(ids, np.zeros(0, np.int32)),
            _joined(types, np.zeros(0, np.uint8)) if self.with_types else None,
            np.cumsum([0, *sizes], dtype=np.int64),
            np.array(source, np.int64),
            left_out,
            spans=_joined(spans, np.zeros((0, 2), np.int32)),
            parts=_joined(parts, np.zeros(0, np.uint8)),
            begins=np.array(begins, np.int64),
        )

    def ranges(self, text: str, spans: np.ndarray, room: int) -> Ranges:
        """The chunks of a text whose tokens have these `spans`, with `room` for so many of them."""
        if self.at == "tokens" or len(spans) <= room:
            return ranges_of(len(spans), room, self.overlap, self.limit)
        sentences = np.unique(np.searchsorted(np.maximum.accumulate(spans[:, 1]), sentences_of(text), "right"))
        is_behind_blank = np.append(True, _is_blank(text))
        words = np.flatnonzero((spans[:, 0] >= 0) & is_behind_blank[spans[:, 0]])
        return ranges_at(sentences, words, len(spans), room, self.overlap, self.limit)

    def read(self, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids, spans) of each text, without special tokens: int32 (tokens,), (tokens, 2), -1 for no character. White
        space before a word is in its span, if it is in its token.
        """
        ids, spans = [np.zeros(0, np.int32)], [np.zeros((0, 2), np.int32)]
        for group in _groups((text, piece) for text in texts for piece in self.pieces(text)):
            pieces = [text[piece.start : piece.stop] for text, piece in group]
            encodings = self.tokenizer.encode_batch(pieces, add_special_tokens=False)
            for (text, piece), one in zip(group, encodings, strict=True):
                places = np.array(one.offsets, np.int32).reshape(-1, 2)
                ids.append(np.array(one.ids, np.int32))
                spans.append(np.where(places[:, 1:] > places[:, :1], places + piece.start, -1).astype(np.int32))
                if piece.stop == len(text):
                    yield np.concatenate(ids), np.concatenate(spans)
                    del ids[1:], spans[1:]

    def _trimmed(self, text: str, ids: np.ndarray, spans: np.ndarray) -> np.ndarray:
        """The spans of tokens as TokenChunks has them, of those that `read` gives."""
        is_blank = np.append(_is_blank(text), True)
        begins, ends = spans.T
        places = np.arange(len(is_blank), dtype=np.int32)
        following = np.minimum.accumulate(np.where(is_blank, places[-1], places)[::-1])[::-1]  # the next that is none
        preceding = np.maximum.accumulate(np.where(is_blank, np.int32(-1), places))
        has_chars = begins < ends
        begins = np.where(has_chars, np.minimum(following[begins], ends), begins)
        ends = np.where(has_chars, np.maximum(preceding[ends - 1] + 1, begins), ends)
        is_of_a_word = np.isin(ids, self._blanks) & (begins == ends) & (begins > 0) & ~is_blank[begins]
        ends = ends + is_of_a_word
        ends = _with_marks(text, begins, ends, is_blank)
        return np.where(begins < ends, (begins, ends), -1).T

    def pieces(self, text: str) -> Iterator[slice]:
        """Parts of a text that are tokenised by themselves, with the tokens that they have in the whole text."""
        start = 0
        for stop in partings(self.tokenizer, text):
            yield slice(start, stop)
            start = stop
        if is_long(len(text) - start):
            warnings.warn(
                f"fastbert: {len(text) - start:,} characters of a text are tokenised at once, which takes memory: they"
                " have no place, such as a blank, where a cut would surely leave the tokens as they are",
                stacklevel=2,
            )
        yield slice(start, len(text))


def _with_marks(text: str, begins: np.ndarray, ends: np.ndarray, is_blank: np.ndarray) -> np.ndarray:
    """The ends of tokens behind what no token stands for and belongs to their last character."""
    begins_of_words = np.where(begins < ends, begins, len(text))
    following = np.append(np.minimum.accumulate(begins_of_words[::-1])[::-1][1:], len(text))  # token's first character
    gaps = np.flatnonzero((begins < ends) & (ends < following) & ~is_blank[ends])
    if not len(gaps):  # of most texts
        return ends
    from unicode_segmentation_rs import graphemes

    ends = ends.copy()
    for i, last, stop in zip(gaps.tolist(), (ends[gaps] - 1).tolist(), following[gaps].tolist(), strict=True):
        ends[i] = last + len(graphemes(text[last:stop], True)[0])
    return ends


def _is_blank(text: str) -> np.ndarray:
    """Of each character whether it is white space, as str.isspace has it."""
    return _IS_BLANK[np.minimum(np.frombuffer(text.encode("utf-32-le"), np.uint32), len(_IS_BLANK) - 1)]


def _groups(pieces: Iterable[tuple[str, slice]]) -> Iterator[list[tuple[str, slice]]]:
    """Pieces that are tokenised at once."""
    group: list[tuple[str, slice]] = []
    chars = 0
    for text, piece in pieces:
        group.append((text, piece))
        chars += piece.stop - piece.start
        if chars >= CHARS_AT_ONCE or len(group) == TEXTS_AT_ONCE:
            yield group
            group, chars = [], 0
    if group:
        yield group


def _joined(parts: list[np.ndarray], empty: np.ndarray) -> np.ndarray:
    return np.concatenate(parts) if parts else empty
