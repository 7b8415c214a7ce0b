"""Classification of tokens: a tag for each word, and the entities that tags spell (CoNLL-2003; seqeval's rules)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert.checkpoint.pretrained import read_config
from fastbert.data.chunks.words import Words, spells_entities
from fastbert.data.sentence_folder import FolderSettings
from fastbert.data.tokenized import CHUNK_INPUTS
from fastbert.data.usage import Usage
from fastbert.models.auto import AutoModelForTokenClassification
from fastbert.packed_inputs import PackedInputs
from fastbert.sentences.spans.token_classifier import TokenClassifier
from fastbert.training.finetuning.adapters import add_adapters
from fastbert.training.finetuning.base_models import check_stride, find_base, load_base, say_notes, settings_of
from fastbert.training.finetuning.head_task import HeadTask, LabelledSequences, note_of_windows
from fastbert.training.finetuning.inputs.labels import Labels
from fastbert.training.finetuning.inputs.tagged import Tagged, load_tagged
from fastbert.training.finetuning.metrics import tag_metrics
from fastbert.training.options import FinetuneOptions
from fastbert.training.task import Totals, labels_in

IGNORED = -100


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
    tagger = tagger_of(model, tokenizer, usage, settings_of(folder))
    return TokenClassification(
        model,
        tokenizer,
        examples_of(tagger.words(train.words), train, labels),
        usage,
        add_adapters(model, options),
        tagger=tagger,
        labels=labels,
        held_out=held_out,
    )


class TokenClassification(HeadTask):
    """A tag for each word, learnt at its first token."""

    pipeline = "token-classification"

    def __init__(self, *parts: Any, tagger: TokenClassifier, labels: Labels, held_out: Tagged | None):
        super().__init__(*parts)
        self.tagger, self.labels, self.held_out = tagger, labels, held_out
        self._eval = None if held_out is None else tagger.words(held_out.words)
        self.metric = None
        if held_out is not None:
            self.metric = "f1" if spells_entities(labels.names) else "accuracy"

    @staticmethod
    def counts(batch: PackedInputs) -> list[int]:
        return [labels_in(batch)]

    def loss(self, model: Any, batch: PackedInputs, totals: Totals) -> torch.Tensor:
        return model(**batch, num_items_in_batch=totals[0]).loss

    def evaluate(self, model: Any) -> dict[str, float]:
        assert self.held_out is not None and self._eval is not None
        judged = self.whole(model)
        scores = self._eval.job(judged, "core").run(judged.device, share=CHUNK_INPUTS)
        index_of = {name: i for i, name in enumerate(self.labels.names)}
        wanted = np.array([index_of[tag] for tags in self.held_out.tags for tag in tags])
        has_token = self._eval.spoken
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


def tagger_of(model: Any, tokenizer: Tokenizer, usage: Usage, settings: FolderSettings) -> TokenClassifier:
    """Raises ConfigError: chunks would overlap by more than they have room for."""
    tagger = TokenClassifier.of_parts(model, tokenizer, TokenClassifier.length_of(model, usage), settings, usage)
    check_stride(tagger, usage.own_windows)
    return tagger


def examples_of(words: Words, tagged: Tagged, labels: Labels) -> LabelledSequences:
    """The tags of words at their first tokens."""
    index_of = {name: i for i, name in enumerate(labels.names)}
    wanted = np.array([index_of[tag] for tags in tagged.tags for tag in tags], np.int64)
    targets = np.full(len(words.chunks.ids), IGNORED, np.int64)
    targets[words.tokens] = wanted[words.of_word]
    say_notes(note_of_windows(len(words.chunks) - len(tagged.words), tagged.name))
    silent = int((~words.spoken).sum())
    if silent:
        say_notes(f"the tokenizer makes nothing of {silent:,} words of {tagged.name}; their tags are left out")
    return LabelledSequences(words.chunks, per_token=True, labels=targets)
