"""Classification of texts and of pairs of texts: one label, several at once, or a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from fastbert.checkpoint.pretrained import read_config
from fastbert.data.tokenized import CHUNK_INPUTS, Tokenized, run_batches, tokenize
from fastbert.errors import ConfigError
from fastbert.models.auto import AutoModelForSequenceClassification
from fastbert.packed_inputs import PackedInputs
from fastbert.sentences.scorer import label_probabilities
from fastbert.training.finetuning.adapters import add_adapters
from fastbert.training.finetuning.base_models import find_base, load_base, longest_of, say_notes
from fastbert.training.finetuning.head_task import HeadTask, LabelledSequences, note_of_cut, shown_names
from fastbert.training.finetuning.inputs import rows as columns
from fastbert.training.finetuning.inputs.labels import Labels, class_weights, find_labels
from fastbert.training.finetuning.metrics import class_metrics, number_metrics, several_metrics
from fastbert.training.finetuning.usage import Usage
from fastbert.training.options import FinetuneOptions

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
    labels = find_labels(data.train, label, data.train_name, options.problem_type)
    model, tokenizer = load_base(folder, AutoModelForSequenceClassification, options, labels.config)
    if not model.missing_keys:
        labels = labels.in_order_of(read_config(folder).id2label, options.model)
        model.config.id2label = dict(enumerate(labels.names or ("LABEL_0",)))
    usage = Usage("classification", texts, options.max_length)
    reader = Classifier(model, tokenizer, usage)

    def examples(rows: Any, where: str) -> LabelledSequences:
        values = labels.values(rows, where)
        made = reader.tokenize([columns.texts_of(rows, name, where) for name in texts])
        say_notes(note_of_cut(len(made.cut), len(made), where, options.max_length, longest_of(model)))
        return LabelledSequences(made, labels=values)

    train = examples(data.train, data.train_name)
    held_out = None if data.eval is None else examples(data.eval, data.eval_name)
    weights = class_weights(options.class_weights, labels, train.labels["labels"])
    adapters = add_adapters(model, options)
    return Classification(model, tokenizer, train, usage, adapters, labels=labels, held_out=held_out, weights=weights)


class Classification(HeadTask):
    """A label, several, or a number for each input. `weights`: how much each class counts in the loss."""

    pipeline = "text-classification"

    def __init__(
        self,
        *parts: Any,
        labels: Labels,
        held_out: LabelledSequences | None = None,
        weights: np.ndarray | None = None,
    ):
        super().__init__(*parts)
        self.labels, self.held_out = labels, held_out
        self.weights = None if weights is None else torch.from_numpy(weights)
        self.metric = None if held_out is None else _METRICS[labels.problem][1]

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
        assert self.held_out is not None
        metrics = _METRICS[self.labels.problem][0]
        return metrics(logits_of(self.whole(model), self.held_out.sequences), self.held_out.labels["labels"])

    def show(self, batch: PackedInputs) -> list[str]:
        texts = self.decoded(batch)
        return [f"{text} -> {self._shown(label)}" for text, label in zip(texts, batch["labels"], strict=True)]

    def _shown(self, label: torch.Tensor) -> str:
        if self.labels.problem == "regression":
            return f"{label.item():g}"
        if self.labels.problem == "multi_label_classification":
            return shown_names([name for name, on in zip(self.labels.names, label, strict=True) if on])
        return self.labels.names[int(label)]


class Classifier:
    """From texts, or pairs of them, to their labels. A row of input is one text a column."""

    is_pair = True  # what it may be

    def __init__(self, model: Any, tokenizer: Tokenizer, usage: Usage):
        self.tokenizer, self.with_types, self.config = tokenizer, model.base_model.table_sizes().has_types, model.config
        side = (tokenizer.truncation or {}).get("direction", "right")  # the folder's
        tokenizer.enable_truncation(usage.max_length or longest_of(model), direction=side)

    def tokenize(self, texts: Sequence[Sequence[str]]) -> Tokenized:
        """Of columns of texts: one, or two."""
        inputs: Any = texts[0] if len(texts) == 1 else list(zip(*texts, strict=True))
        return tokenize(self.tokenizer, inputs, with_types=self.with_types)

    @property
    def kind(self) -> str:
        """Where the config does not say: as transformers' pipeline takes it."""
        given = self.config.problem_type
        if given not in (None, *_METRICS):
            raise ConfigError(f"problem_type {given!r} is none of {', '.join(_METRICS)}")
        return given or ("multi" if self.config.num_labels == 1 else "single") + "_label_classification"

    def answers(
        self, model: Any, texts: Mapping[str, Sequence[str]], *, threshold: float = 0.5, every: bool = False, **run: Any
    ) -> dict[str, Any]:
        """Columns: `label` and its probability `score`; `labels` and `scores` above the threshold, of several at once;
        or `value`. `every`: the probability of each label, too.
        """
        logits = logits_of(model, self.tokenize(list(texts.values())), **run)
        names = [self.config.id2label[i] for i in range(logits.shape[1])]
        if self.kind == "regression":
            found: dict[str, Any] = (
                {"value": logits[:, 0]} if len(names) == 1 else dict(zip(names, logits.T, strict=True))
            )
            return {**texts, **found}
        scores = label_probabilities(torch.from_numpy(logits), self.kind).numpy()
        if self.kind == "multi_label_classification":
            above = [np.flatnonzero(row > threshold) for row in scores]
            found = {
                "labels": [[names[i] for i in chosen] for chosen in above],
                "scores": [row[chosen].tolist() for row, chosen in zip(scores, above, strict=True)],
            }
        else:
            found = {"label": [names[i] for i in logits.argmax(-1)], "score": scores.max(-1)}
        return {**texts, **found, **(dict(zip(names, scores.T, strict=True)) if every else {})}


def logits_of(
    model: Any,
    made: Tokenized,
    batch_tokens: int | None = None,
    on_batch: Callable[[int], Any] = lambda inputs: None,
) -> np.ndarray:
    """float32 (inputs, num_labels)."""
    found = np.empty((len(made), model.config.num_labels), np.float32)
    for places, output in run_batches(model, made, model.device, batch_tokens, share=CHUNK_INPUTS, on_batch=on_batch):
        found[places] = output.logits.float().cpu().numpy()
    return found
