"""What a Reranker and a TextClassifier share: a classification head over texts or pairs of texts, packed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert.data.sentence_folder import FolderSettings
from fastbert.data.tokenized import Text
from fastbert.data.usage import usage_of
from fastbert.errors import ConfigError, InputError
from fastbert.models.auto import AutoModelForSequenceClassification
from fastbert.models.base import PreTrainedModel
from fastbert.models.classifiers import PROBLEMS, ForSequenceClassification
from fastbert.packed_inputs import PackedInputs
from fastbert.sentences.batches import check_listed, check_pair
from fastbert.sentences.loading import open_folder
from fastbert.sentences.text_model import InferenceOptions, TextModel

if TYPE_CHECKING:
    from fastbert.data.chunks import Pool, TokenChunks, Windows
    from fastbert.data.chunks.job import ChunkJob, Rows


class SequenceScorer(TextModel):
    """A model with a head for whole sequences, and a tokenizer of texts and pairs."""

    model: ForSequenceClassification
    what: ClassVar[str]  # that it is given, in messages
    transformer_task, model_type = "sequence-classification", "CrossEncoder"
    # Of the chunks of a text: which of them count, and what of them.
    default_pool: ClassVar[Pool] = "mean"
    default_aggregate: ClassVar[str] = "probabilities"

    def _assemble(
        self, model: PreTrainedModel, tokenizer: Tokenizer, max_seq_length: int, settings: FolderSettings | None = None
    ) -> None:
        super()._assemble(model, tokenizer, max_seq_length, settings)
        self.num_labels = model.live_config.num_labels
        self.has_types = self.settings.transformer.gives_types and model.base_model.table_sizes().has_types

    def _load(self, name_or_path: str | os.PathLike[str], organisation: str | None, options: Mapping[str, Any]) -> None:
        opened = open_folder(name_or_path, self.transformer_task, organisation, options)
        model = opened.whole(AutoModelForSequenceClassification, self.what)
        self._assemble(model, opened.tokenizer(), opened.length(model), opened.settings)
        self.folder, self.usage = opened.root, usage_of(opened.folder)
        self.windows = self.usage.own_windows if self.usage is not None and self.usage.windows else None

    def saved_settings(self) -> dict[str, Any]:
        named = self.settings.activation_fn
        return {} if named is None else {"activation_fn": named}

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Of the labels, (inputs, num_labels) as the logits are: see label_probabilities."""
        return label_probabilities(logits, self.model.config.problem_type)

    def no_rows(self, options: InferenceOptions) -> torch.Tensor:
        return torch.empty(0, self.num_labels, device=self.device, dtype=torch.promote_types(self.dtype, torch.float32))

    def job(self, inputs: list[Text], options: InferenceOptions) -> ChunkJob[torch.Tensor]:
        """The logits of texts, of all their chunks (of a pair the second text is cut): see `aggregated`."""
        chunks, windows, aggregate = self._chunks_of(inputs, options)
        if aggregate == "vectors":
            return self._of_vectors(chunks, windows)
        return self._of_chunks(chunks, options).then(
            lambda logits: self._on_device(aggregated(logits, chunks, windows, aggregate, self.problem_type))
        )

    def passages_job(
        self, inputs: list[Text], options: InferenceOptions
    ) -> ChunkJob[tuple[torch.Tensor, list[tuple[int, int]]]]:
        """With the logits of texts where the best passage of each is: the characters of the chunk with the highest
        first logit. Raises InputError: the chunks have no logits, for their vectors are combined.
        """
        chunks, windows, aggregate = self._chunks_of(inputs, options)
        if aggregate == "vectors":
            raise InputError(
                "aggregate='vectors' gives chunks no scores, so that none is the best: use 'probabilities' or 'logits'"
            )

        def finish(logits: np.ndarray) -> tuple[torch.Tensor, list[tuple[int, int]]]:
            best = [one[logits[one, 0].argmax()] for one in chunks.of_texts]
            places = [(max(0, start), max(0, end)) for start, end in chunks.characters[best].tolist()]
            return self._on_device(aggregated(logits, chunks, windows, aggregate, self.problem_type)), places

        return self._of_chunks(chunks, options).then(finish)

    def _chunks_of(self, inputs: list[Text], options: InferenceOptions) -> tuple[TokenChunks, Windows, str]:
        """The chunks of inputs, what becomes of them, and what of them is combined."""
        from fastbert.sentences.documents import cut_inputs

        assert options.windows is not None
        windows = replace(options.windows, pool=options.windows.pool or self.default_pool)
        return cut_inputs(self, inputs, windows, options.prompt), windows, options.aggregate or self.default_aggregate

    def _of_chunks(self, chunks: TokenChunks, options: InferenceOptions) -> ChunkJob[np.ndarray]:
        """Their logits, (chunks, num_labels)."""
        from fastbert.data.chunks.job import ChunkJob, on_host

        return ChunkJob(chunks, partial(self.compute, options=options), lambda logits, _: on_host(logits), np.asarray)

    def _of_vectors(self, chunks: TokenChunks, windows: Windows) -> ChunkJob[torch.Tensor]:
        """The logits of texts, of what goes into the head for their chunks, combined."""
        from fastbert.data.chunks.job import ChunkJob, on_host

        if self.model.pooling == "late":
            raise InputError("aggregate='vectors' needs a head over one vector a text, and this model's is over tokens")

        @torch.inference_mode()
        def finish(rows: Rows) -> torch.Tensor:
            vectors = torch.from_numpy(windows.combined(np.asarray(rows), chunks)).to(self.device, self.dtype)
            return self.model.classified(vectors).to(torch.promote_types(self.dtype, torch.float32))

        return ChunkJob(chunks, self.model.packed_vectors, lambda vectors, _: on_host(vectors), finish)

    def _on_device(self, logits: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(logits).to(self.device)

    @property
    def problem_type(self) -> str:
        """What labels mean: by the config, or as transformers' pipeline takes it. Raises ConfigError."""
        configured = self.model.config.problem_type
        if configured not in (None, *PROBLEMS):
            raise ConfigError(f"problem_type {configured!r} is none of {', '.join(PROBLEMS)}")
        return configured or ("multi" if self.num_labels == 1 else "single") + "_label_classification"

    @torch.inference_mode()
    def compute(self, batch: PackedInputs, options: InferenceOptions) -> torch.Tensor:
        """The logits, (sequences, num_labels), at least float32."""
        batch = batch.to(self.device)
        others = {name: value for name, value in batch.items() if name != "input_ids"}
        logits = self.model(batch["input_ids"], **others).logits
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def aggregated(
    logits: np.ndarray, chunks: TokenChunks, windows: Windows, aggregate: str, problem_type: str | None
) -> np.ndarray:
    """The logits of texts, of those of their chunks (chunks, num_labels): (texts, num_labels), dtype kept.

    With "logits" these are combined; with "probabilities" the chunks' probabilities are, and what comes back are their
    logits: `label_probabilities` gives the combined probabilities (which add up to 1, as a softmax does). A text of one
    chunk has that one's logits. The values of a regression have no other form.
    """
    if aggregate == "logits" or problem_type == "regression":
        return windows.combined(logits, chunks).astype(logits.dtype)
    x = torch.from_numpy(logits.astype(np.float64))
    probabilities = windows.combined(label_probabilities(x, problem_type).numpy(), chunks)
    tiny = np.finfo(np.float64).tiny
    result = np.log(np.maximum(probabilities, tiny))
    if is_multi_label(problem_type, logits.shape[-1]):  # of a sigmoid: beside the chance that it is none of these
        result -= np.log(np.maximum(-windows.combined(-torch.sigmoid(-x).numpy(), chunks), tiny))
    chunks_of_text = np.bincount(chunks.source)
    alone = chunks_of_text[chunks.source] == 1
    result[chunks.source[alone]] = logits[alone]
    return result.astype(logits.dtype)


def is_multi_label(problem_type: str | None, num_labels: int) -> bool:
    return problem_type == "multi_label_classification" or num_labels == 1


@torch.inference_mode()
def label_probabilities(logits: torch.Tensor, problem_type: str | None) -> torch.Tensor:
    """Of logits (inputs, num_labels): from a softmax; from a sigmoid for one label, or for several at once. A
    regression's numbers are as they are.
    """
    if problem_type == "regression":
        return logits
    return logits.sigmoid() if is_multi_label(problem_type, logits.shape[-1]) else logits.softmax(-1)


def check_pairs(inputs: Any) -> tuple[list[tuple[str, str]], bool]:
    """The pairs, and whether one was given by itself."""
    check_listed("inputs", inputs, "a list of pairs of texts", pairs=True)
    listed = list(inputs)
    if listed and isinstance(listed[0], str):
        return [check_pair("inputs", listed)], True
    return [check_pair(f"inputs[{i}]", pair) for i, pair in enumerate(listed)], False


def label_names(model: PreTrainedModel) -> tuple[str, ...]:
    """The names of a model's labels, LABEL_i where the config has none."""
    config = model.live_config
    return tuple(config.id2label.get(i, f"LABEL_{i}") for i in range(config.num_labels))
