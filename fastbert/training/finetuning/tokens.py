"""Classification of tokens: a tag for each word, and the entities that tags spell (CoNLL-2003; seqeval's rules)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy.special import log_softmax
from tokenizers import Tokenizer

from fastbert.checkpoint.pretrained import read_config
from fastbert.data.tokenized import CHUNK_INPUTS, run_batches
from fastbert.data.windows import CORE, Cutter, TokenWindows
from fastbert.errors import ConfigError, InputError
from fastbert.models.auto import AutoModelForTokenClassification
from fastbert.packed_inputs import PackedInputs
from fastbert.training.finetuning.adapters import add_adapters
from fastbert.training.finetuning.base_models import find_base, load_base, longest_of, say_notes
from fastbert.training.finetuning.head_task import HeadTask, LabelledSequences
from fastbert.training.finetuning.inputs.labels import Labels
from fastbert.training.finetuning.inputs.tagged import Tagged, load_tagged
from fastbert.training.finetuning.metrics import entities_of, tag_metrics
from fastbert.training.finetuning.usage import Usage
from fastbert.training.options import FinetuneOptions

IGNORED = -100
# Words of a text, as the data sets for entities have them: without the punctuation around, and each ideograph alone.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_OPEN, _CLOSE = r"[(\[{<\"'`«“‘„]", r"[)\]}>\"'»”’.,;:!?…]"
_END = rf"(?=\s|$|{_CLOSE}|[{_CJK}])"
_POSSESSIVE = rf"['’]s{_END}"
_WORD = re.compile(
    rf"[{_CJK}]|{_POSSESSIVE}|{_OPEN}|{_CLOSE}|(?:(?!{_CLOSE}+(?:\s|$|[{_CJK}])|{_POSSESSIVE})[^\s{_CJK}])+"
)


def make_task(options: FinetuneOptions) -> TokenClassification:
    """Raises ConfigError, InputError, CheckpointError."""
    folder = find_base(options)
    train, held_out, names = load_tagged(options)
    labels = Labels("single_label_classification", names, "tags")
    model, tokenizer = load_base(folder, AutoModelForTokenClassification, options, {"id2label": dict(enumerate(names))})
    if not model.missing_keys:
        labels = labels.in_order_of(read_config(folder).id2label, options.model)
        model.config.id2label = dict(enumerate(labels.names))
    usage = Usage("tokens", train.columns, options.max_length, options.doc_stride or None)
    tagger = Tagger(model, tokenizer, usage)
    return TokenClassification(
        model, tokenizer, tagger.examples(train, labels), usage, add_adapters(model, options),
        tagger=tagger, labels=labels, held_out=held_out,
    )  # fmt: skip


class TokenClassification(HeadTask):
    """A tag for each word, learnt at its first token."""

    pipeline = "token-classification"

    def __init__(self, *parts: Any, tagger: Tagger, labels: Labels, held_out: Tagged | None):
        super().__init__(*parts)
        self.tagger, self.labels, self.held_out = tagger, labels, held_out
        self._eval = None if held_out is None else tagger.words(held_out.words)
        self.metric = None
        if held_out is not None:
            self.metric = "f1" if spells_entities(labels.names) else "accuracy"

    def counts(self, batch: PackedInputs) -> list[int]:
        return [batch["batch"].labelled.numel()]

    def loss(self, model: Any, batch: PackedInputs, totals: list[float]) -> torch.Tensor:
        return model(**batch, num_items_in_batch=totals[0]).loss

    def evaluate(self, model: Any) -> dict[str, float]:
        assert self.held_out is not None and self._eval is not None
        scores = self._eval.scores(self.whole(model))
        place = {name: i for i, name in enumerate(self.labels.names)}
        wanted = np.array([place[tag] for tags in self.held_out.tags for tag in tags])
        has_token = self._eval.token >= 0
        loss = -scores[has_token, wanted[has_token]].mean() if has_token.any() else 0.0
        said = self._eval.tags(scores, self.labels.names)
        return {"loss": float(loss)} | tag_metrics(said, self.held_out.tags, spells_entities(self.labels.names))

    def show(self, batch: PackedInputs) -> list[str]:
        ids, tags, ends = batch["input_ids"].tolist(), batch["labels"].tolist(), batch["batch"].cu_seqlens.tolist()
        shown = [
            str(self.tokenizer.id_to_token(i)) + ("" if tag == IGNORED else f"/{self.labels.names[tag]}")
            for i, tag in zip(ids, tags, strict=True)
        ]
        return [" ".join(shown[start:end]) for start, end in pairwise(ends)]


def spells_entities(names: Sequence[str]) -> bool:
    """Whether tags are O, and B-, I-, E-, S- with a type."""
    return all(name == "O" or name[:2] in ("B-", "I-", "E-", "S-", "L-", "U-") for name in names)


class Words:
    """Tokenised texts, and for each of their words the token that speaks for it.

    starts, ends: the characters of each word. counts: words of each text. token: int64 (words,), the word's first
    token, in the window of whose core it is; -1: the tokenizer makes nothing of the word.
    """

    def __init__(
        self, sequences: TokenWindows, texts: Sequence[str], starts: np.ndarray, ends: np.ndarray, counts: Any
    ):
        self.sequences, self.texts, self.starts, self.ends, self.counts = sequences, texts, starts, ends, counts
        first = np.cumsum(counts) - counts  # each text's first word
        span, parts, source = sequences.spans, sequences.parts, sequences.source
        of_token = sequences.of_token
        found = np.flatnonzero((span[:, 0] >= 0) & (parts == CORE))
        text = source[of_token[found]]
        # The word that a character is of, blanks before it included: its number among all words, by one search. Texts
        # are laid out one behind the other, a character apart.
        base = np.cumsum([0, *(len(t) + 1 for t in texts)])
        all_starts = starts + np.repeat(base[:-1], counts)
        all_ends = ends + np.repeat(base[:-1], counts)
        begin = span[found, 0] + base[text]
        word = np.searchsorted(all_ends, begin, "right")
        inside = (word < len(all_ends)) & (word < first[text] + counts[text])
        found, word, begin = found[inside], word[inside], begin[inside]
        is_first = begin <= all_starts[word]
        found, word = found[is_first][::-1], word[is_first][::-1]
        self.token = np.full(len(starts), -1, np.int64)
        self.token[word] = found  # of several the first, which comes last here

    def scores(
        self, model: Any, batch_tokens: int | None = None, on_batch: Callable[[int], Any] = lambda n: None
    ) -> np.ndarray:
        """Logarithms of the tags' probabilities, float32 (words, num_labels); 0 where a word has no token."""
        offsets = self.sequences.offsets
        place = np.full(len(self.sequences.ids), -1, np.int64)
        spoken = np.flatnonzero(self.token >= 0)
        place[self.token[spoken]] = spoken
        found = np.zeros((len(self.token), model.config.num_labels), np.float32)
        batches = run_batches(model, self.sequences, model.device, batch_tokens, share=CHUNK_INPUTS, on_batch=on_batch)
        for places, output in batches:
            words = place[np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in places])]
            kept = np.flatnonzero(words >= 0)
            logits = output.logits[torch.from_numpy(kept).to(output.logits.device)].float().cpu().numpy()
            found[words[kept]] = log_softmax(logits, -1)
        return found

    def tags(self, scores: np.ndarray, names: Sequence[str]) -> list[list[str]]:
        """The likeliest tag of each word, by text; O for a word without a token."""
        nothing = names.index("O") if "O" in names else 0
        best = np.where(self.token >= 0, scores.argmax(-1), nothing).tolist()
        ends = np.cumsum(self.counts).tolist()
        return [
            [names[i] for i in best[end - count : end]] for end, count in zip(ends, self.counts.tolist(), strict=True)
        ]


class Tagger:
    """From texts to tags. Texts that are too long are cut into windows, which overlap."""

    is_pair = False

    def __init__(self, model: Any, tokenizer: Tokenizer, usage: Usage):
        self.names = [model.config.id2label[i] for i in range(model.config.num_labels)]
        length = usage.max_length or longest_of(model)
        overlap = length // 4 if usage.stride is None else usage.stride
        with_types = model.base_model.table_sizes().has_types
        try:
            self.cutter = Cutter(tokenizer, length, overlap, with_types=with_types)
        except InputError as error:
            raise ConfigError(f"doc_stride is {overlap}: {error}") from None

    def words(self, words: Sequence[Sequence[str]]) -> Words:
        """Of texts that are split into words already."""
        lengths = np.fromiter((len(word) for text in words for word in text), np.int64)
        counts = np.fromiter(map(len, words), np.int64, len(words))
        first = np.cumsum(counts) - counts
        steps = np.cumsum(lengths + 1) - (lengths + 1)  # a blank between two words
        starts = steps - np.repeat(steps[np.minimum(first, max(0, len(steps) - 1))] if len(steps) else first, counts)
        texts = [" ".join(text) for text in words]
        return Words(self.cutter.cut(texts), texts, starts, starts + lengths, counts)

    def raw(self, texts: Sequence[str]) -> Words:
        """Of texts as people write them."""
        spans = [[found.span() for found in _WORD.finditer(text)] for text in texts]
        counts = np.fromiter(map(len, spans), np.int64, len(spans))
        ends = np.array([span for one in spans for span in one], np.int64).reshape(-1, 2)
        return Words(self.cutter.cut(texts), texts, ends[:, 0], ends[:, 1], counts)

    def examples(self, tagged: Tagged, labels: Labels) -> LabelledSequences:
        words = self.words(tagged.words)
        place = {name: i for i, name in enumerate(labels.names)}
        wanted = np.array([place[tag] for tags in tagged.tags for tag in tags], np.int64)
        found = np.full(len(words.sequences.ids), IGNORED, np.int64)
        spoken = words.token >= 0
        found[words.token[spoken]] = wanted[spoken]
        windows, silent = len(words.sequences) - len(tagged.words), int((~spoken).sum())
        if windows:
            say_notes(f"texts of {tagged.name} that are too long go on in {windows:,} more windows")
        if silent:
            say_notes(f"the tokenizer makes nothing of {silent:,} words of {tagged.name}; their tags are left out")
        return LabelledSequences(words.sequences, per_token=True, labels=found)

    def answers(self, model: Any, texts: Mapping[str, Sequence[Any]], **run: Any) -> dict[str, Any]:
        """Columns: `text`, and `entities`, each with its label, text, characters and probability."""
        (given,) = texts.values()
        is_split = [not isinstance(text, str) for text in given]
        if any(is_split) != all(is_split):
            raise InputError("some rows hold a text, and some a list of words: give one or the other")
        words = self.words(given) if any(is_split) else self.raw(given)
        scores = words.scores(model, **run)
        best, found, first = np.exp(scores.max(-1)), [], 0
        for text, tags in zip(words.texts, words.tags(scores, self.names), strict=True):
            here = slice(first, first + len(tags))
            starts, ends, sure = words.starts[here].tolist(), words.ends[here].tolist(), best[here]
            first += len(tags)
            found.append([
                {"label": label, "text": text[starts[a] : ends[b]], "start": starts[a], "end": ends[b],
                 "score": float(sure[a : b + 1].mean())}
                for label, a, b in entities_of(tags, spells_entities(self.names))
            ])  # fmt: skip
        return {"text": list(words.texts), "entities": found}
