"""What a Reranker and a TextClassifier share: a classification head over texts or pairs of texts, packed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer

from fastbert.checkpoint.weight_files import some
from fastbert.data.sentence_folder import FolderSettings
from fastbert.errors import CheckpointError
from fastbert.models.auto import AutoModelForSequenceClassification
from fastbert.models.base import PreTrainedModel
from fastbert.models.heads import HeadModel
from fastbert.packed_inputs import PackedInputs
from fastbert.sentences.batches import check_text
from fastbert.sentences.loading import open_folder
from fastbert.sentences.text_model import InferenceOptions, TextModel


class SequenceScorer(TextModel):
    """A model with a head for whole sequences, and a tokenizer of texts and pairs."""

    model: HeadModel
    what: ClassVar[str]  # that it is given, in messages

    def _assemble(
        self, model: PreTrainedModel, tokenizer: Tokenizer, max_seq_length: int, settings: FolderSettings | None = None
    ) -> None:
        super()._assemble(model, tokenizer, max_seq_length, settings)
        self.num_labels = model.live_config.num_labels
        self.has_types = model.base_model.table_sizes().has_types

    def _load(self, name_or_path: str | os.PathLike[str], organisation: str | None, options: Mapping[str, Any]) -> None:
        opened = open_folder(name_or_path, "sequence-classification", organisation, options)
        model = AutoModelForSequenceClassification.from_pretrained(
            opened.folder, dtype=opened.dtype or "auto", **opened.config
        )
        if model.missing_keys:
            raise CheckpointError(
                f"{name_or_path} is no {self.what}: its checkpoint lacks {some(model.missing_keys)}, and random weights"
                " score nothing"
            )
        opened.quantised(model)
        self._assemble(model, opened.tokenizer(), opened.length(model), opened.settings)
        self.folder = opened.root

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Of the labels, (inputs, num_labels) as the logits are: see label_probabilities."""
        return label_probabilities(logits, self.model.config.problem_type)

    def no_rows(self, options: InferenceOptions) -> torch.Tensor:
        return torch.empty(0, self.num_labels, device=self.device, dtype=torch.promote_types(self.dtype, torch.float32))

    def compute(self, batch: PackedInputs, options: InferenceOptions) -> torch.Tensor:
        """The logits, (sequences, num_labels), at least float32."""
        others = {name: value for name, value in batch.items() if name != "input_ids"}
        logits = self.model(batch["input_ids"], **others).logits
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


@torch.inference_mode()
def label_probabilities(logits: torch.Tensor, problem_type: str | None) -> torch.Tensor:
    """Of logits (inputs, num_labels): from a softmax; from a sigmoid for one label, or for several at once. A
    regression's numbers are as they are.
    """
    if problem_type == "regression":
        return logits
    is_multi = problem_type == "multi_label_classification" or logits.shape[-1] == 1
    return logits.sigmoid() if is_multi else logits.softmax(-1)


def check_pair(name: str, pair: Any) -> tuple[str, str]:
    """A pair of texts. Raises TypeError, or InputError for what is no Unicode."""
    if isinstance(pair, (str, bytes, Mapping)) or not isinstance(pair, Iterable):
        raise TypeError(f"{name} is a {type(pair).__name__}; it must be a pair of texts")
    texts = tuple(pair)
    if len(texts) != 2:
        raise TypeError(f"{name} has {len(texts)} parts; it must be a pair of texts")
    for i, text in enumerate(texts):
        check_text(f"{name}[{i}]", text)
    return texts
