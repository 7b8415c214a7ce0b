"""Classification of texts and of pairs of texts: one label, several at once, or a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from fastbert.checkpoint.pretrained import read_config
from fastbert.data.chunks import TokenChunks
from fastbert.data.tokenized import CHUNK_INPUTS, Tokenized, run_batches
from fastbert.data.usage import Usage
from fastbert.errors import ConfigError
from fastbert.models.auto import AutoModelForSequenceClassification
from fastbert.packed_inputs import PackedInputs
from fastbert.sentences.classifier import TextClassifier
from fastbert.sentences.documents import cut_inputs
from fastbert.sentences.scorer import aggregated
from fastbert.sentences.text_model import position_limit
from fastbert.training.finetuning.adapters import add_adapters
from fastbert.training.finetuning.base_models import check_stride, find_base, load_base, say_notes, settings_of
from fastbert.training.finetuning.head_task import (
    HeadTask,
    LabelledSequences,
    note_of_cut,
    note_of_windows,
    shown_names,
)
from fastbert.training.finetuning.inputs import rows as columns
from fastbert.training.finetuning.inputs.labels import Labels, class_weights, find_labels
from fastbert.training.finetuning.metrics import class_metrics, number_metrics, several_metrics
from fastbert.training.options import FinetuneOptions
from fastbert.training.task import Totals

_METRICS = {
    "single_label_classification": (class_metrics, "accuracy"),
    "multi_label_classification": (several_metrics, "micro_f1"),
    "regression": (number_metrics, "spearman"),
}


def make_task(options: FinetuneOptions) -> Classification:
    """Raises ConfigError, InputError, CheckpointError."""
    folder, data = find_base(options), columns.load_rows(options)
    names = data.train.column_names
    texts = columns.text_columns(names, options.text_columns, data.train_name)
    label = columns.label_column([name for name in names if name not in texts], options.label_column, data.train_name)
    columns.check_same_columns(data, [*texts, label])
    labels = find_labels(data.train, label, data.train_name, options.problem_type, options.label_type)
    model, tokenizer = load_base(folder, AutoModelForSequenceClassification, options, labels.config)
    if not model.missing_keys:
        labels = labels.in_order_of(read_config(folder).id2label, options.model)
        model.config.id2label = dict(enumerate(labels.names or ("LABEL_0",)))
    if options.doc_stride and not options.windows:
        raise ConfigError("doc_stride is for windows of long texts, and there are none: give --windows, too")
    usage = Usage("classification", texts, options.max_length, options.doc_stride or None, windows=options.windows)
    reader = TextClassifier.of_parts(model, tokenizer, options.max_length, settings_of(folder))
    if usage.windows:
        check_stride(reader, usage.own_windows)

    def held(rows: Any, where: str) -> LabelledTexts:
        values = labels.values(rows, where)
        inputs = columns.inputs_of([columns.texts_of(rows, name, where) for name in texts])
        if usage.windows:
            sequences: Tokenized = cut_inputs(reader, inputs, usage.own_windows)
            say_notes(note_of_windows(len(sequences) - len(inputs), where))
            return LabelledTexts(sequences, values)
        sequences = reader.tokenize(inputs)
        say_notes(note_of_cut(len(sequences.cut), len(sequences), where, options.max_length, position_limit(model)))
        return LabelledTexts(sequences, values)

    train = held(data.train, data.train_name)
    held_out = None if data.eval is None else held(data.eval, data.eval_name)
    weights = class_weights(options.class_weights, labels, train.labels)
    # A chunk has its text's label.
    examples = LabelledSequences(train.sequences, labels=train.labels[train.sequences.source])
    return Classification(
        model,
        tokenizer,
        examples,
        usage,
        add_adapters(model, options),
        labels=labels,
        held_out=held_out,
        weights=weights,
    )


class LabelledTexts(NamedTuple):
    """sequences: of texts, or their windows. labels: a row a text."""

    sequences: Tokenized
    labels: np.ndarray


class Classification(HeadTask):
    """A label, several, or a number for each input. `weights`: how much each class counts in the loss."""

    pipeline = "text-classification"

    def __init__(
        self,
        *parts: Any,
        labels: Labels,
        held_out: LabelledTexts | None = None,
        weights: np.ndarray | None = None,
    ):
        super().__init__(*parts)
        self.labels, self.held_out = labels, held_out
        self.weights = None if weights is None else torch.from_numpy(weights)
        self.metric = None if held_out is None else _METRICS[labels.problem][1]

    @staticmethod
    def counts(batch: PackedInputs) -> list[int]:
        return [batch["labels"][batch["batch"].has_tokens()].numel()]

    def loss(self, model: Any, batch: PackedInputs, totals: Totals) -> torch.Tensor:
        if self.weights is None:
            return model(**batch, num_items_in_batch=totals[0]).loss
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs).logits.float()
        labels = batch["labels"].where(batch["batch"].has_tokens(), -100)
        weights = self.weights.to(logits.device)[labels.clamp(min=0)]
        return (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / totals[0]

    def evaluate(self, model: Any) -> dict[str, float]:
        assert self.held_out is not None
        sequences, labels = self.held_out
        logits = logits_of(self.whole(model), sequences)
        if isinstance(sequences, TokenChunks):
            windows, aggregate = self.usage.own_windows, TextClassifier.default_aggregate
            logits = aggregated(logits, sequences, windows, aggregate, self.labels.problem)
        return _METRICS[self.labels.problem][0](logits, labels)

    def show(self, batch: PackedInputs) -> list[str]:
        texts = self.decoded(batch)
        return [f"{text} -> {self._shown(label)}" for text, label in zip(texts, batch["labels"], strict=True)]

    def _shown(self, label: torch.Tensor) -> str:
        if self.labels.problem == "regression":
            return f"{label.item():g}"
        if self.labels.problem == "multi_label_classification":
            return shown_names([name for name, on in zip(self.labels.names, label, strict=True) if on])
        return self.labels.names[int(label)]


def logits_of(
    model: Any,
    sequences: Tokenized,
    batch_tokens: int | None = None,
    on_batch: Callable[[int], Any] = lambda inputs: None,
) -> np.ndarray:
    """float32 (inputs, num_labels)."""
    logits = np.empty((len(sequences), model.config.num_labels), np.float32)
    for indices, output in run_batches(
        model, sequences, model.device, batch_tokens, share=CHUNK_INPUTS, on_batch=on_batch
    ):
        logits[indices] = output.logits.float().cpu().numpy()
    return logits
