"""TokenClassifier finds the entities of texts, or gives each of their words a tag."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from fastbert.data.chunks import Windows
from fastbert.data.chunks.job import ChunkJob
from fastbert.data.chunks.words import WordAggregate, Words, words_of
from fastbert.data.tokenized import CHUNK_INPUTS
from fastbert.errors import ConfigError, InputError
from fastbert.messages import absent, install
from fastbert.models.auto import AutoModelForTokenClassification
from fastbert.models.classifiers import ForTokenClassification
from fastbert.sentences.batches import check_iterable, check_text, check_texts, in_chunks, progress_bar
from fastbert.sentences.loading import LoadArguments
from fastbert.sentences.scorer import label_names
from fastbert.sentences.spans.model import SpanModel
from fastbert.sentences.text_model import InferenceOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

Entities = list[list[dict[str, Any]]]


class TokenClassifier(SpanModel):
    """What transformers' pipeline for token classification is for, over texts of any length, on packed batches."""

    model: ForTokenClassification
    task, what = "tokens", "token classifier"

    def __init__(self, model_name_or_path: str | os.PathLike[str], **options: Unpack[LoadArguments]):
        """From the folder or hub id of a model for token classification; the rest as for a Reranker.

        A folder that `fastbert finetune` made has the length of its training's chunks, and their overlap. Raises
        ConfigError where seqeval is not installed, too.
        """
        if missing := absent("seqeval"):
            raise ConfigError(f"a TokenClassifier needs {', '.join(missing)}: {install('train')}")
        self._load(AutoModelForTokenClassification, model_name_or_path, options)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the tags, LABEL_i where the config has none."""
        return label_names(self.model)

    def predict(
        self,
        inputs: str | Iterable[str | Sequence[str]],
        show_progress_bar: bool | None = None,
        *,
        batch_tokens: int | None = None,
        windows: Windows | None = None,
        aggregate: WordAggregate = "core",
    ) -> list[dict[str, Any]] | Entities:
        """The entities of a text, or of each of a list: dicts with label, text, start, end (characters) and score.

        Args:
            inputs: a text, or many; those of a list may be split into words already, all of them or none. `start` and
                `end` are then of the words with a blank between two.
            show_progress_bar, batch_tokens: as of a Reranker.
            windows: how texts are cut that are longer than the model takes. None: `self.windows`. A text of which only
                the begin is to be read has Chunks(pool="first").
            aggregate: which of the chunks that a word is in speak for it. "core": the one in which it is farthest from
                a cut, which has seen most of what stands around it; or the mean of all of them: of their "logits", of
                their "probabilities", or of the "vectors" that go into the head.

        Raises:
            TypeError: an input is no text. InputError: it is not valid Unicode, or an option is out of bounds.
        """
        listed, budget = _check_inputs(inputs), InferenceOptions(batch_tokens=batch_tokens).batch_tokens
        entities: Entities = []
        with progress_bar(None, show_progress_bar, unit=" tokens", unit_scale=True, desc="tagging") as bar:
            for chunk in in_chunks(listed, CHUNK_INPUTS):
                entities += self.entities_job(chunk, windows, aggregate).run(self.device, budget, on_tokens=bar.update)
        return entities[0] if isinstance(inputs, str) else entities

    def entities_job(
        self, inputs: Sequence[str | Sequence[str]], windows: Windows | None = None, aggregate: WordAggregate = "core"
    ) -> ChunkJob[Entities]:
        """What gives the entities of checked inputs. Raises InputError."""
        words = self.words(inputs, windows, aggregate)
        return words.job(self.model, aggregate).then(lambda scores: words.entities(scores, self.labels))

    def words(
        self, inputs: Sequence[str | Sequence[str]], windows: Windows | None = None, aggregate: WordAggregate = "core"
    ) -> Words:
        """The words of texts, or of texts as lists of words, which are cut. Raises InputError."""
        if aggregate not in get_args(WordAggregate):
            raise InputError(f"unknown aggregate {aggregate!r}; there are {', '.join(get_args(WordAggregate))}")
        are_split = {not isinstance(one, str) for one in inputs}
        if len(are_split) == 2:
            raise InputError("some rows hold a text, and some a list of words: give one or the other")
        texts = [one if isinstance(one, str) else " ".join(one) for one in inputs]
        places = [words_of(one) if isinstance(one, str) else _side_by_side(one) for one in inputs]
        counts = np.fromiter(map(len, places), np.int64, len(places))
        spans = np.array([span for one in places for span in one], np.int64).reshape(-1, 2)
        chunks = self.cutter(windows).cut(texts)
        return Words(chunks, texts, spans[:, 0], spans[:, 1], counts, everywhere=aggregate != "core")


def _check_inputs(inputs: Any) -> list[str | Sequence[str]]:
    if isinstance(inputs, str):
        return list(check_texts(inputs))
    check_iterable("inputs", inputs, "a text, or a list of texts or of words")
    listed = list(inputs)
    for i, one in enumerate(listed):
        if isinstance(one, (list, tuple)):
            for j, word in enumerate(one):
                check_text(f"inputs[{i}][{j}]", word)
        else:
            check_text(f"inputs[{i}]", one)
    return listed


def _side_by_side(words: Sequence[str]) -> list[tuple[int, int]]:
    """Where words begin and end in their text, in which a blank is between two."""
    ends = (np.cumsum([len(word) + 1 for word in words]) - 1).tolist()
    return [(end - len(word), end) for word, end in zip(words, ends, strict=True)]
