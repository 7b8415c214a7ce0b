"""Examples of pre-training, cut from a corpus: chunks of a document, and pairs of chunks (NSP, SOP).

Every epoch cuts at other places. What an example is follows from the seed, the epoch and its number; its tokens are put
together when it is read, in a DataLoader's worker.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from fastbert.data.long_texts.template import Template
from fastbert.data.masking import example_keys, uniform
from fastbert.data.pretraining.corpus import Corpus
from fastbert.errors import InputError

Pairs = Literal["nsp", "sop"]
_LABELS = {"nsp": "next_sentence_label", "sop": "sentence_order_label"}
_SPLIT, _KIND, _OTHER = range(3)  # what a number is drawn for


class CorpusChunks:
    """The examples of an epoch, each a chunk of a document: as long as `max_length` allows, but at a document's ends.

    Args:
        corpus, tokenizer: which has tokenised it. max_length: of an example, special tokens included.
        seed, epoch: the first chunk of a document is shorter by a number drawn from them.
        with_types: whether examples have token_type_ids.

    Raises InputError: max_length leaves no room for tokens.
    """

    def __init__(
        self, corpus: Corpus, tokenizer: Tokenizer, max_length: int, *, seed: int, epoch: int, with_types: bool = True
    ):
        self.corpus, self.template, self.with_types = corpus, Template.of(tokenizer, 1), with_types
        self.starts, self.stops = cut_chunks(corpus, _room(max_length, self.template), seed, epoch)

    @property
    def lengths(self) -> np.ndarray:
        return self.stops - self.starts + self.template.added

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids, types = self.template.around(self.corpus.tokens[self.starts[i] : self.stops[i]])
        return {"input_ids": ids, "token_type_ids": types} if self.with_types else {"input_ids": ids}


class CorpusPairs:
    """The examples of an epoch: pairs of sequences A and B, which stand one behind the other in a document or do not.

    "nsp": half of the B are from another document, and have the label 1 (Devlin et al. 2018, section 3.1). A chunk is
    cut in two where a segment ends, if one does in its inner half, else anywhere in it. "sop": half of the pairs are in
    the wrong order, and have the label 1 (Lan et al. 2019, section 3.1). A and B are whole segments where a chunk has
    two of them, else parts of segments. Either way a label cannot be told from which ends are ends of segments.

    The arguments are those of `CorpusChunks`; types say of which of the two a token is. `label` is the labels' name,
    where it is not that of the kind of pairs.
    Raises InputError, too: "nsp" of a corpus of one document, or no chunk of two tokens.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        max_length: int,
        pairs: Pairs,
        *,
        seed: int,
        epoch: int,
        label: str | None = None,
        with_types: bool = True,
    ):
        if pairs not in _LABELS:
            raise InputError(f"pairs is {pairs!r}; it must be one of {', '.join(_LABELS)}")
        if pairs == "nsp" and len(corpus.documents) < 3:
            raise InputError(
                "the corpus has one document, and half of the pairs of nsp are of two: separate documents by blank"
                " lines, or leave nsp out"
            )
        self.corpus, self.template, self.label = corpus, Template.of(tokenizer, 2), label or _LABELS[pairs]
        self.with_types = with_types
        starts, stops = cut_chunks(corpus, _room(max_length, self.template), seed, epoch)
        starts, stops = starts[stops - starts > 1], stops[stops - starts > 1]
        keys = example_keys(seed, epoch, range(len(starts)))
        nothing = np.zeros(len(starts), np.int64)
        draws = uniform(keys, nothing, _SPLIT)
        if pairs == "sop":
            starts, split, stops = _alike_ends(corpus, starts, stops, draws)
        else:
            split = _split(corpus, starts, stops, draws)
        self.labels = (uniform(keys, nothing, _KIND) < 0.5).astype(np.int64)
        self.a, self.b = np.stack([starts, split], 1), np.stack([split, stops], 1)
        is_changed = self.labels == 1
        if pairs == "sop":
            self.a[is_changed], self.b[is_changed] = self.b[is_changed], self.a[is_changed]
        else:
            self.b[is_changed] = _elsewhere(corpus, self.b[is_changed], uniform(keys, nothing, _OTHER)[is_changed])

    @property
    def lengths(self) -> np.ndarray:
        return (self.a[:, 1] - self.a[:, 0]) + (self.b[:, 1] - self.b[:, 0]) + self.template.added

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        tokens = self.corpus.tokens
        ids, types = self.template.around(*(tokens[start:stop] for start, stop in (self.a[i], self.b[i])))
        told = {"token_type_ids": types} if self.with_types else {}
        return {"input_ids": ids, **told, self.label: int(self.labels[i])}


def _room(max_length: int, template: Template) -> int:
    room = max_length - template.added
    least = len(template.type_of)
    if room < least:
        raise InputError(f"max_length is {max_length}; the special tokens alone take {template.added}")
    return room


def cut_chunks(corpus: Corpus, room: int, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, stops) in the corpus' tokens: every document cut into chunks of `room` tokens, its first one and its
    last one being shorter.
    """
    sizes = np.diff(corpus.documents)
    keys = example_keys(seed, epoch, range(len(sizes)))
    first = 1 + (uniform(keys, np.zeros(len(sizes), np.int64), _SPLIT) * room).astype(np.int64)  # 1 to room
    first = np.where(sizes <= room, sizes, first)  # a document that fits stays whole
    counts = 1 + -(-(sizes - first) // room)
    document = np.repeat(np.arange(len(sizes)), counts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = corpus.documents[:-1][document]
    starts = begin + np.where(nth == 0, 0, first[document] + (nth - 1) * room)
    stops = np.minimum(begin + first[document] + nth * room, corpus.documents[1:][document])
    return starts, stops


def _inner_half(starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last place where a chunk may be cut in two."""
    margin = np.maximum(1, (stops - starts) // 4)
    return starts + margin, stops - margin


def _split(corpus: Corpus, starts: np.ndarray, stops: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Where each chunk of "nsp" is cut in two."""
    low, high = _inner_half(starts, stops)
    anywhere = low + (draws * (high - low + 1)).astype(np.int64)
    first, last = np.searchsorted(corpus.segments, low, "left"), np.searchsorted(corpus.segments, high, "right")
    count = last - first  # of segments that end there
    chosen = first + (draws * count).astype(np.int64)
    return np.where(count > 0, corpus.segments[np.minimum(chosen, len(corpus.segments) - 1)], anywhere)


def _alike_ends(
    corpus: Corpus, starts: np.ndarray, stops: np.ndarray, draws: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each chunk of "sop" begins, is cut in two, and ends: at ends of segments, or inside of segments, but not
    some here and some there. A full stop before the cut, and none at the chunk's end, would tell the order.
    """
    segments = corpus.segments
    first, last = np.searchsorted(segments, starts, "left"), np.searchsorted(segments, stops, "right") - 1
    whole = last - first  # segments in a chunk
    middle = np.minimum(first + 1 + (draws * (whole - 1)).astype(np.int64), len(segments) - 1)
    can_shrink = stops - starts > 3
    inside = starts + (can_shrink & np.isin(starts, segments)), stops - (can_shrink & np.isin(stops, segments))
    low, high = _inner_half(*inside)
    split = low + (draws * (high - low + 1)).astype(np.int64)
    split += np.isin(split, segments) & (split + 1 < inside[1])
    ends = (segments[np.minimum(first, len(segments) - 1)], segments[middle], segments[last])
    cuts = [np.where(whole > 1, *both) for both in zip(ends, (inside[0], split, inside[1]), strict=True)]
    return cuts[0], cuts[1], cuts[2]


def _elsewhere(corpus: Corpus, spans: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """For each span (start, stop) one of another document, at most as long. It begins where a segment begins if the
    span does, and ends where one ends if the span does and a segment ends there.
    """
    segments = corpus.segments
    own = np.searchsorted(corpus.documents, spans[:, 0], "right") - 1
    begin, end = corpus.documents[own], corpus.documents[own + 1]
    others = len(corpus.tokens) - (end - begin)  # a place among the tokens of all other documents
    offset = (draws * others).astype(np.int64)
    starts = np.where(offset < begin, offset, offset + (end - begin))
    starts = np.where(np.isin(spans[:, 0], segments), segments[np.searchsorted(segments, starts, "right") - 1], starts)
    ends = corpus.documents[np.searchsorted(corpus.documents, starts, "right")]
    stops = np.minimum(starts + spans[:, 1] - spans[:, 0], ends)
    last = segments[np.searchsorted(segments, stops, "right") - 1]
    return np.stack([starts, np.where(np.isin(spans[:, 1], segments) & (last > starts), last, stops)], 1)
