"""Classification of texts and of pairs of texts: one label, several at once, or a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fastbert.models.auto import AutoModelForSequenceClassification
from fastbert.packed_inputs import PackedInputs
from fastbert.training.finetuning import rows as columns
from fastbert.training.finetuning.base_models import find_base, has_types, load_base
from fastbert.training.finetuning.head_task import HeadTask, LabelledSequences
from fastbert.training.finetuning.labels import Labels, class_weights, find_labels
from fastbert.training.finetuning.metrics import class_metrics, number_metrics, several_metrics
from fastbert.training.finetuning.sequences import Sequences, run_model, tokenize
from fastbert.training.options import FinetuneOptions


def make_task(options: FinetuneOptions) -> Classification:
    """Raises ConfigError, InputError, CheckpointError."""
    folder, data = find_base(options), columns.load_rows(options)
    names = data.train.column_names
    texts = columns.text_columns(names, options.text_columns, data.train_name)
    label = columns.label_column([name for name in names if name not in texts], options.label_column, data.train_name)
    columns.check_same_columns(data, [*texts, label])
    labels = find_labels(data.train, label, data.train_name, options.problem_type)
    values = labels.values(data.train, data.train_name)
    held_out = None if data.eval is None else labels.values(data.eval, data.eval_name)
    weights = class_weights(options.class_weights, labels, values)
    model, tokenizer = load_base(folder, AutoModelForSequenceClassification, options, labels.config)
    tokenizer.enable_truncation(options.max_length)

    def tokens(rows: Any, where: str) -> Sequences:
        read = [columns.texts_of(rows, name, where) for name in texts]
        return tokenize(tokenizer, *read, with_types=has_types(model))

    train = LabelledSequences(tokens(data.train, data.train_name), labels=values)
    task = Classification(model, tokenizer, train, labels, weights)
    if data.eval is not None:
        task.hold_out(LabelledSequences(tokens(data.eval, data.eval_name), labels=held_out))
    return task


class Classification(HeadTask):
    """A label, several, or a number for each input. `weights`: how much each class counts in the loss."""

    pipeline = "text-classification"

    def __init__(
        self, model: Any, tokenizer: Any, train: LabelledSequences, labels: Labels, weights: np.ndarray | None = None
    ):
        super().__init__(model, tokenizer, train)
        self.labels, self.weights = labels, None if weights is None else torch.from_numpy(weights)
        self.eval: LabelledSequences | None = None

    def hold_out(self, examples: LabelledSequences) -> None:
        """Judge by these."""
        self.eval = examples
        names = {"regression": "spearman", "multi_label_classification": "micro_f1"}
        self.metric = names.get(self.labels.problem, "accuracy")

    def counts(self, batch: PackedInputs) -> list[int]:
        return [batch["labels"].numel()]

    def loss(self, model: Any, batch: PackedInputs, totals: list[float]) -> torch.Tensor:
        if self.weights is None:
            return model(**batch, num_items_in_batch=totals[0]).loss
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs).logits.float()
        weights = self.weights.to(logits.device)
        losses = F.cross_entropy(logits, batch["labels"], reduction="none") * weights[batch["labels"]]
        return losses.sum() / totals[0]

    def evaluate(self, model: Any) -> dict[str, float]:
        assert self.eval is not None
        scores, wanted = logits_of(model, self.eval.sequences), self.eval.labels["labels"]
        if self.labels.problem == "regression":
            return number_metrics(scores[:, 0], wanted)
        if self.labels.problem == "multi_label_classification":
            return several_metrics(scores, wanted)
        return class_metrics(scores, wanted)

    def show(self, batch: PackedInputs) -> list[str]:
        ids, ends = batch["input_ids"], batch["batch"].cu_seqlens.tolist()
        return [
            f"{self.tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False)} -> {self._shown(label)}"
            for start, end, label in zip(ends, ends[1:], batch["labels"], strict=False)
        ]

    def _shown(self, label: torch.Tensor) -> str:
        if self.labels.problem == "regression":
            return f"{label.item():g}"
        if self.labels.problem == "multi_label_classification":
            return ", ".join(name for name, on in zip(self.labels.names, label, strict=True) if on) or "no label"
        return self.labels.names[int(label)]


def logits_of(model: Any, sequences: Sequences, **options: Any) -> np.ndarray:
    """float32 (inputs, num_labels)."""
    found: Any = None
    for indices, output in run_model(model, sequences, **options):
        logits = output.logits.float().cpu().numpy()
        found = np.empty((len(sequences), logits.shape[1]), np.float32) if found is None else found
        found[indices] = logits
    return found


def is_above(logits: np.ndarray, threshold: float) -> np.ndarray:
    """Whether the sigmoid is above a threshold, in (0, 1)."""
    return logits > np.log(threshold / (1.0 - threshold))


def names_of(indices: Sequence[int], names: Sequence[str]) -> list[str]:
    return [names[i] for i in indices]
