"""What a model says of the words of texts, from chunks of their tokens: a word's first token speaks for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from fastbert.data.chunks import CORE, TokenChunks
from fastbert.data.chunks.job import ChunkJob, Rows, chosen, on_host, tokens_at
from fastbert.packed_inputs import PackedInputs

# Of the chunks that a word is in: the one in which it is farthest from a cut, or what of all of them is averaged.
WordAggregate = Literal["core", "logits", "probabilities", "vectors"]
# Words of a text, as the data sets for entities have them: without the punctuation around, and each ideograph alone.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_OPEN, _CLOSE = r"[(\[{<\"'`«“‘„]", r"[)\]}>\"'»”’.,;:!?…]"
_END = rf"(?=\s|$|{_CLOSE}|[{_CJK}])"
_POSSESSIVE = rf"['’]s{_END}"
_WORD = re.compile(
    rf"[{_CJK}]|{_POSSESSIVE}|{_OPEN}|{_CLOSE}|(?:(?!{_CLOSE}+(?:\s|$|[{_CJK}])|{_POSSESSIVE})[^\s{_CJK}])+"
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).log_softmax(-1).numpy()


def words_of(text: str) -> list[tuple[int, int]]:
    """Where the words of a text begin and end, in characters."""
    return [match.span() for match in _WORD.finditer(text)]


class Words:
    """Texts that are cut into chunks, and for each of their words the tokens that speak for it.

    starts, ends: the characters of each word, int64 (words,). counts: words of each text. tokens: int64 (n,), in order,
    tokens that speak, and of_word which word each of them speaks for: the word's first token, in the chunk of whose
    core it is, or in every chunk that it is in (`everywhere`). That is the first one that has any of its characters:
    normalizers delete some, at the begin of a word, too. A token of several words is the first one's. A word of which
    the tokenizer makes nothing has none.
    """

    def __init__(
        self,
        chunks: TokenChunks,
        texts: Sequence[str],
        starts: np.ndarray,
        ends: np.ndarray,
        counts: np.ndarray,
        *,
        everywhere: bool = False,
    ):
        self.chunks, self.texts, self.starts, self.ends, self.counts = chunks, texts, starts, ends, counts
        span, of_token = chunks.spans, chunks.of_token
        tokens = np.flatnonzero((span[:, 0] >= 0) & ((chunks.parts == CORE) | everywhere))
        # The word that a token is of: its number among all words, by one search. Texts are laid out one behind the
        # other, a character apart.
        base = np.cumsum([0, *(len(t) + 1 for t in texts)])
        all_starts = np.append(starts + np.repeat(base[:-1], counts), base[-1])  # and one behind the last text
        all_ends = ends + np.repeat(base[:-1], counts)
        begin, end = (span[tokens] + base[chunks.source[of_token[tokens]], None]).T
        word = np.searchsorted(all_ends, begin, "right")
        is_inside = end > all_starts[word]
        tokens, word = tokens[is_inside], word[is_inside]
        position = chunks.positions[tokens]
        first = np.full(len(starts), len(span))
        np.minimum.at(first, word, position)
        is_first = position == first[word]
        self.tokens, self.of_word = tokens[is_first], word[is_first]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def spoken(self) -> np.ndarray:
        """Whether a word has a token, bool (words,)."""
        return np.bincount(self.of_word, minlength=len(self)) > 0

    def job(self, model: Any, aggregate: str) -> ChunkJob[np.ndarray]:
        """Logarithms of the tags' probabilities, float32 (words, num_labels), by a model for tokens; 0 where a word has
        no token.
        """
        speaks = np.zeros(len(self.chunks.ids), bool)
        speaks[self.tokens] = True
        counts = np.bincount(self.chunks.of_token[self.tokens], minlength=len(self.chunks))

        def forward(batch: PackedInputs) -> torch.Tensor:
            return model.packed_vectors(batch) if aggregate == "vectors" else model(batch).logits

        def reduce(packed: torch.Tensor, places: np.ndarray) -> list[np.ndarray]:
            rows = on_host(chosen(packed, speaks[tokens_at(self.chunks, places)]))
            return np.split(rows, np.cumsum(counts[places])[:-1])

        def finish(rows: Rows) -> np.ndarray:
            log_probs = np.zeros((len(self), model.config.num_labels), np.float32)
            if not len(self.tokens):
                return log_probs
            said, spoken = np.concatenate(rows), self.spoken
            if aggregate == "core":
                log_probs[self.of_word] = log_softmax(said)
                return log_probs
            if aggregate == "probabilities":
                said = np.exp(log_softmax(said.astype(np.float64)))
            means = np.zeros((len(self), said.shape[1]))
            np.add.at(means, self.of_word, said)
            means = means[spoken] / np.bincount(self.of_word, minlength=len(self))[spoken, None]
            if aggregate == "vectors":
                vectors = torch.from_numpy(means).to(model.device, model.dtype)
                means = on_host(model.classified(vectors))
            log_probs[spoken] = np.log(means) if aggregate == "probabilities" else log_softmax(means)
            return log_probs

        return ChunkJob(self.chunks, forward, reduce, finish)

    def tags(self, scores: np.ndarray, names: Sequence[str]) -> list[list[str]]:
        """The likeliest tag of each word, by text; O for a word without a token."""
        nothing = names.index("O") if "O" in names else 0
        best = np.where(self.spoken, scores.argmax(-1), nothing).tolist()
        ends = np.cumsum(self.counts).tolist()
        return [
            [names[i] for i in best[end - count : end]] for end, count in zip(ends, self.counts.tolist(), strict=True)
        ]

    def entities(self, scores: np.ndarray, names: Sequence[str]) -> list[list[dict[str, Any]]]:
        """The entities of each text: label, text, its characters `start` and `end`, and `score`, the mean of its words'
        probabilities.
        """
        best, by_text, first = np.exp(scores.max(-1)), [], 0
        for text, tags in zip(self.texts, self.tags(scores, names), strict=True):
            here = slice(first, first + len(tags))
            starts, ends, sure = self.starts[here].tolist(), self.ends[here].tolist(), best[here]
            first += len(tags)
            by_text.append(
                [
                    {
                        "label": label,
                        "text": text[starts[a] : ends[b]],
                        "start": starts[a],
                        "end": ends[b],
                        "score": float(sure[a : b + 1].mean()),
                    }
                    for label, a, b in entities_of(tags, spells_entities(names))
                ]
            )
        return by_text


def spells_entities(names: Sequence[str]) -> bool:
    """Whether tags are O, and B-, I-, E-, S- with a type."""
    return all(name == "O" or name[:2] in ("B-", "I-", "E-", "S-", "L-", "U-") for name in names)


def entities_of(tags: list[str], is_entities: bool) -> list[tuple[str, int, int]]:
    """(type, first word, last word) of what tags spell, by seqeval's rules; each word where they spell no entities."""
    if not is_entities:
        return [(tag, i, i) for i, tag in enumerate(tags)]
    from seqeval.metrics.sequence_labeling import get_entities

    return [(label, first, last) for label, first, last in get_entities(tags)]
