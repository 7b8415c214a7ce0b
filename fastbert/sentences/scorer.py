"""What a Reranker and a TextClassifier share: a classification head over texts or pairs of texts, packed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from tokenizers import Tokenizer

from fastbert.checkpoint.weight_files import some
from fastbert.data.sentence_folder import Settings
from fastbert.errors import CheckpointError
from fastbert.models.auto import AutoModelForSequenceClassification
from fastbert.models.base import PreTrainedModel
from fastbert.models.heads import HeadModel
from fastbert.sentences.batches import check_text, flat, longest_first, packed
from fastbert.sentences.loading import open_folder
from fastbert.sentences.text_model import RunOptions, TextModel

Input = str | tuple[str, str]


class Tokenized(NamedTuple):
    """The ids of a text or a pair, special tokens included, and for each which text it is of: 0 or 1."""

    ids: list[int]
    type_ids: list[int]


class SequenceScorer(TextModel):
    """A model with a head for whole sequences, and a tokenizer of texts and pairs."""

    model: HeadModel
    what: ClassVar[str]  # that it is given, in messages

    def _assemble(
        self, model: PreTrainedModel, tokenizer: Tokenizer, max_seq_length: int, settings: Settings | None = None
    ) -> None:
        super()._assemble(model, tokenizer, max_seq_length, settings)
        self.num_labels = model.live_config.num_labels
        # One row is RoBERTa's: its tokenizers count no texts. Without a table the ids are the tokenizer's own affair.
        self._has_types = model.base_model.table_sizes().token_types > 1

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

    def tokenize(self, inputs: Iterable[Input], prompt: str = "") -> list[Tokenized]:
        """What the model gets of each text or pair, cut to max_seq_length: of a pair the longer text is cut."""
        listed: Any = list(inputs)
        if prompt:
            listed = [prompt + x if isinstance(x, str) else (prompt + x[0], x[1]) for x in listed]
        return [Tokenized(encoding.ids, encoding.type_ids) for encoding in self.tokenizer.encode_batch_fast(listed)]

    def logits(
        self,
        tokenized: list[Tokenized],
        *,
        batch_tokens: int | None = None,
        on_batch: Callable[[int], Any] = lambda inputs: None,
    ) -> torch.Tensor:
        """What the head gives for each, in their order: (inputs, num_labels) on the model's device, at least float32.

        `on_batch(inputs)` is called after each batch. Raises InputError for a budget below 1.
        """
        return self._logits_of(tokenized, RunOptions(batch_tokens=batch_tokens), on_batch)

    @torch.inference_mode()
    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Of the labels, (inputs, num_labels) as the logits are: from a softmax; from a sigmoid for one label, or for
        several at once (`problem_type`). A regression's numbers are as they are.
        """
        kind = self.model.config.problem_type
        if kind == "regression":
            return logits
        return logits.sigmoid() if kind == "multi_label_classification" or self.num_labels == 1 else logits.softmax(-1)

    def rows(
        self, inputs: list[Input], options: RunOptions, on_batch: Callable[[int], Any] = lambda inputs: None
    ) -> torch.Tensor:
        device = torch.device("cpu") if options.on_host else self.device
        logits = torch.empty(len(inputs), self.num_labels, device=device, dtype=self._logits_dtype)
        for places, chunk in longest_first(inputs):
            rows = self._logits_of(self.tokenize(chunk, options.prompt), options, on_batch)
            logits[torch.tensor(places, device=device)] = rows.to(device)
        return logits

    @property
    def _logits_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @torch.inference_mode()
    def _logits_of(
        self, tokenized: list[Tokenized], options: RunOptions, on_batch: Callable[[int], Any]
    ) -> torch.Tensor:
        logits = torch.empty(len(tokenized), self.num_labels, device=self.device, dtype=self._logits_dtype)
        for batch in self.batches([len(one.ids) for one in tokenized], options):
            input_ids, cu_seqlens, longest = packed([tokenized[i].ids for i in batch], self.device)
            types = flat([tokenized[i].type_ids for i in batch], self.device) if self._has_types else None
            rows = self.model(input_ids, token_type_ids=types, cu_seqlens=cu_seqlens, max_seqlen=longest).logits
            logits[torch.tensor(batch, device=self.device)] = rows.to(self._logits_dtype)
            on_batch(len(batch))
        return logits


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
