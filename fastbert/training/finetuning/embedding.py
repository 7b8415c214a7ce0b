"""Sentence embeddings: texts that belong together get vectors that are close (Reimers & Gurevych 2019).

Files have columns anchor, positive and any negatives, or sentence1, sentence2 and a score. All texts of a batch go
through the encoder in one call. A batch too large for the memory is cut (`accumulation`), and its loss still goes over
all of it: GradCache (Gao et al. 2021).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fastbert import ops
from fastbert.data.sentence_folder import Recipe
from fastbert.data.tokenized import CHUNK_INPUTS, Tokenized
from fastbert.errors import ConfigError, InputError
from fastbert.models.base import EncoderModel
from fastbert.models.quantized import is_quantized
from fastbert.packed_inputs import PackedInputs, pack_inputs
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.pooling import pool
from fastbert.training.distributed import gradients_stay_local
from fastbert.training.finetuning import embedding_losses as losses
from fastbert.training.finetuning.base_models import say_notes
from fastbert.training.finetuning.embedding_metrics import ranks_metrics, spearman
from fastbert.training.finetuning.head_task import note_of_cut
from fastbert.training.finetuning.inputs.rows import load_rows, number_of, texts_of
from fastbert.training.options import FinetuneOptions
from fastbert.training.task import Phase, Task, Totals

COLUMN_PAIRS = (("anchor", "positive"), ("sentence1", "sentence2"))
SCORES = ("score", "scores", "label", "labels", "similarity_score")
_NEGATIVE = re.compile(r"negative(_\d+)?")


class EmbeddingModel(nn.Module):
    """An encoder and what follows it in a sentence-transformers folder: packed tokens in, a vector a sequence out."""

    def __init__(self, encoder: EncoderModel, recipe: Recipe):
        super().__init__()
        self.encoder, self.after = encoder, nn.ModuleList(recipe.modules)
        self.pooling = recipe.pooling

    @property
    def config(self) -> Any:
        return self.encoder.config

    @property
    def base_model(self) -> EncoderModel:
        return self.encoder

    def activation_checkpointing_enable(self) -> None:
        self.encoder.activation_checkpointing_enable()

    def forward(self, packed: PackedInputs) -> torch.Tensor:
        """float32 (sequences, dim)."""
        batch = packed["batch"]
        hidden = self.encoder(input_ids=packed["input_ids"], batch=batch).last_hidden_state
        vectors = pool(hidden, batch.cu_seqlens, self.pooling).float()
        for module in self.after:
            vectors = module(vectors)
        return vectors.float()


class Examples:
    """Token ids of each example's texts, and its score if there are scores."""

    def __init__(self, texts: Sequence[Tokenized], scores: np.ndarray | None):
        self.texts, self.scores = texts, scores
        self.lengths = np.sum([sequences.lengths for sequences in texts], axis=0)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Any]:
        example: dict[str, Any] = {"input_ids": [sequences[i]["input_ids"] for sequences in self.texts]}
        return example if self.scores is None else example | {"score": self.scores[i]}


def collate(examples: Sequence[dict[str, Any]]) -> PackedInputs:
    """All texts of all examples in one batch, as the choices of a multiple-choice task are; scores are its labels."""
    scores = np.array([one["score"] for one in examples], np.float32) if "score" in examples[0] else None
    return pack_inputs([one["input_ids"] for one in examples], labels=scores)


class Embedding(Task):
    """Trains the model of `encoder` by `loss`, one of `embedding_losses`: (vectors (examples, texts, dim), is_real
    (examples,), and scores (examples,), if there are some) -> ().
    """

    library, pipeline = "sentence-transformers", "sentence-similarity"

    def __init__(
        self,
        encoder: SentenceEncoder,
        train: Examples,
        loss: Callable[..., torch.Tensor],
        dims: Sequence[int] = (),
        held_out: tuple[list[list[str]], np.ndarray | None] | None = None,
    ):
        self.encoder, self.train, self.loss_of, self.dims, self.held_out = encoder, train, loss, tuple(dims), held_out
        encoder.model.requires_grad_(True)
        for module in encoder.recipe.modules:
            module.requires_grad_(True)
        self.model = EmbeddingModel(encoder.model, encoder.recipe)
        self.texts = len(train.texts)
        if held_out is not None:
            self.metric = "spearman" if held_out[1] is not None else "mrr_at_10"

    def collate(self, phase: Phase) -> Callable[[list[Any]], PackedInputs]:
        return collate

    def examples(self, epoch: int, phase: Phase) -> tuple[Any, Any]:
        return self.train, self.train.lengths

    @staticmethod
    def counts(batch: PackedInputs) -> list[int]:
        return [int(batch["batch"].has_tokens(batch["num_choices"]).sum())]

    def loss(self, model: nn.Module, batch: PackedInputs, totals: Totals) -> torch.Tensor:
        """Over the examples of all ranks, and of this batch alone: a mean by itself, which no total divides."""
        return self._loss_of_all(model(batch), [batch])

    def backward(
        self, model: nn.Module, batches: list[PackedInputs], totals: Totals, autocast: AbstractContextManager
    ) -> torch.Tensor:
        """The loss goes over the examples of all batches and ranks. Each rank computes all of it, and has the gradient
        of its own vectors.
        """
        if len(batches) == 1:
            with autocast:
                loss = self.loss(model, batches[0], totals)
            return _backward_on_all_ranks(loss)
        states, parts, runs = [], [], []
        for batch in batches:
            states.append(_random_state(batch))
            runs.append(ops.with_same_seeds(model))
            with torch.no_grad(), autocast:
                parts.append(runs[-1](batch))
        vectors = torch.cat(parts).requires_grad_()
        loss = _backward_on_all_ranks(self._loss_of_all(vectors, batches))
        assert vectors.grad is not None
        sizes = [len(part) for part in parts]
        for i, (batch, gradient) in enumerate(zip(batches, vectors.grad.split(sizes), strict=True)):
            _set_random_state(states[i])  # the same dropout again, torch's own, too
            with gradients_stay_local(model, i < len(batches) - 1):
                with autocast:
                    again = runs[i](batch)
                again.backward(gradient)
        return loss

    def _loss_of_all(self, vectors: torch.Tensor, batches: list[PackedInputs]) -> torch.Tensor:
        """The loss of all ranks' vectors, of which this rank has these, those of its batches. Not under autocast."""
        arguments = [torch.cat([batch["batch"].has_tokens(self.texts) for batch in batches])]
        if "labels" in batches[0]:
            arguments.append(torch.cat([batch["labels"] for batch in batches]))
        with torch.autocast(vectors.device.type, enabled=False):
            everyone = losses.of_all_ranks(vectors).unflatten(0, (-1, self.texts))
            of_all = [losses.of_all_ranks(values) for values in arguments]
            return losses.over_prefixes(lambda v: self.loss_of(v, *of_all), everyone, self.dims)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert self.held_out is not None
        texts, scores = self.held_out
        full, encoder = self.encoder.full_dim, self._encoder_of(model)
        if scores is None:  # a text is one document, however often it comes
            row_of = {text: i for i, text in enumerate(dict.fromkeys(text for column in texts for text in column))}
            encoded, columns = [list(row_of)], [np.array([row_of[text] for text in column]) for column in texts]
        else:
            encoded, columns = texts, np.split(np.arange(sum(map(len, texts))), len(texts))
        # In the chunks of `fastbert encode`, whose vectors of a column have the same bits.
        streams = (encoder.encode_stream(part, truncate_dim=full, chunk_texts=CHUNK_INPUTS) for part in encoded)
        vectors = np.concatenate([chunk for stream in streams for chunk, _ in stream])
        metrics: dict[str, float] = {}
        for dim in sorted({full, *self.dims}, reverse=True):
            cut = torch.from_numpy(vectors[:, :dim])
            values = ranks_metrics(cut, columns) if scores is None else {"spearman": spearman(cut, columns, scores)}
            metrics |= {name if dim == full else f"{name}_{dim}": value for name, value in values.items()}
        return metrics

    def save(self, model: nn.Module, folder: Path) -> None:
        self._encoder_of(model).save_pretrained(folder)

    def _encoder_of(self, model: nn.Module) -> SentenceEncoder:
        """As the loaded one, with the weights of `model`, which may be a copy of what is trained."""
        assert isinstance(model, EmbeddingModel)
        mine = self.encoder
        recipe = Recipe(mine.recipe.pooling, list(model.after), mine.recipe.prompt_is_pooled)
        encoder = SentenceEncoder.of_parts(model.encoder, mine.tokenizer, mine.max_seq_length, mine.settings, recipe)
        encoder.folder = mine.folder
        return encoder

    def show(self, batch: PackedInputs) -> list[str]:
        ids = batch["input_ids"].split(batch["batch"].cu_seqlens.diff().tolist())
        texts = [self.encoder.tokenizer.decode(one.tolist(), skip_special_tokens=False) for one in ids]
        lines = []
        for i in range(0, len(texts), self.texts):
            score = f"  [{batch['labels'][i // self.texts]:g}]" if "labels" in batch else ""
            lines.append("  |  ".join(texts[i : i + self.texts]) + score)
        return lines


def _backward_on_all_ranks(loss: torch.Tensor) -> torch.Tensor:
    """Ranks' gradients are averaged, and each rank has those that come through its own vectors: they are to add up."""
    (loss * (dist.get_world_size() if dist.is_initialized() else 1)).backward()
    return loss.detach()


def _random_state(batch: PackedInputs) -> list[torch.Tensor]:
    device = batch["input_ids"].device
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def make_task(options: FinetuneOptions) -> Embedding:
    """Files read and checked, texts tokenised, the model loaded. Raises ConfigError, InputError, CheckpointError."""
    rows = load_rows(options)
    columns = columns_of(rows.train.column_names, options.text_columns, rows.train_name)
    score = score_of(rows.train.column_names, options.label_column, rows.train_name)
    name = options.loss if options.loss != "auto" else "cosent" if score else "ranking"
    _check_loss(name, columns, score)
    encoder = _load(options)
    dims, prompt = _dims(options, encoder.full_dim), encoder.prompt()
    held_out = None
    if rows.eval is not None:
        eval_score = score_of(rows.eval.column_names, options.label_column, rows.eval_name)
        eval_columns = columns_of(rows.eval.column_names, options.text_columns, rows.eval_name)
        if eval_score and len(eval_columns) > 2:
            raise InputError(f"{rows.eval_name} has scores and {len(eval_columns)} texts a row; a score is of two")
        held_out = (
            [texts_of(rows.eval, column, rows.eval_name) for column in eval_columns],
            _scores(rows.eval, eval_score, rows.eval_name) if eval_score else None,
        )
    kept = encoder.max_seq_length
    encoder.max_seq_length = min(kept, options.max_length)  # here: what is saved takes texts as long as before
    texts = []
    for column in columns:
        texts.append(encoder.tokenize(texts_of(rows.train, column, rows.train_name), prompt))
        where = f"{column} of {rows.train_name}"
        say_notes(note_of_cut(len(texts[-1].cut), len(texts[-1]), where, encoder.max_seq_length, kept))
    encoder.max_seq_length = kept
    scores = _scores(rows.train, score, rows.train_name) if score and name != "ranking" else None
    if name == "cosine" and scores is not None and (scores.min() < -1 or scores.max() > 1):
        raise InputError(
            f"{rows.train_name}: {score} goes from {scores.min():g} to {scores.max():g}, and a cosine from -1 to 1:"
            " divide the scores, or use --loss cosent, which reads their order only"
        )
    loss_functions: dict[str, Callable[..., torch.Tensor]] = {
        "ranking": partial(losses.ranking, scale=options.scale, symmetric=options.symmetric),
        "cosent": partial(losses.cosent, scale=options.scale),
        "cosine": losses.cosine,
    }
    return Embedding(encoder, Examples(texts, scores), loss_functions[name], dims, held_out)


def columns_of(names: Sequence[str], chosen: Sequence[str], where: str) -> tuple[str, ...]:
    """The columns of texts: what is to be found, what it is to be found for, and what is not to be found.

    Raises InputError, listing what there is.
    """
    if chosen:
        if missing := [name for name in chosen if name not in names]:
            raise InputError(f"{where} has no column {missing[0]!r}; it has: {', '.join(names)}")
        if len(chosen) < 2:
            raise InputError(
                f"text_columns is {chosen[0]!r}; an embedding is learnt from two columns of texts, or more"
            )
        return tuple(chosen)
    for pair in COLUMN_PAIRS:
        if set(pair) <= set(names):
            negatives = [name for name in names if _NEGATIVE.fullmatch(name)] if pair[0] == "anchor" else []
            return (*pair, *negatives)
    pairs = " nor ".join(" and ".join(pair) for pair in COLUMN_PAIRS)
    raise InputError(f"{where} has neither columns {pairs}; name them with --text-columns: {', '.join(names)}")


def score_of(names: Sequence[str], chosen: str, where: str) -> str | None:
    """The column of scores, if there is one. Raises InputError."""
    if chosen and chosen not in names:
        raise InputError(f"{where} has no column {chosen!r}; it has: {', '.join(names)}")
    return chosen or next((name for name in SCORES if name in names), None)


def _check_loss(name: str, columns: Sequence[str], score: str | None) -> None:
    if name == "ranking" and score is not None:
        raise InputError(
            f"the ranking loss takes every pair as one that belongs together, and reads no {score}: leave the column"
            " out, or use --loss cosent or cosine"
        )
    if name != "ranking" and score is None:
        raise InputError(f"the loss {name} needs a column of scores; choose one with --label-column")
    if name != "ranking" and len(columns) > 2:
        raise InputError(f"the loss {name} takes pairs of texts, and there are columns {', '.join(columns)}")


def _scores(rows: Any, column: str, where: str) -> np.ndarray:
    scores = np.array([number_of(value, where, i, column) for i, value in enumerate(rows[column][:])], np.float64)
    if scores.min() == scores.max():
        raise InputError(f"{where}: {column} is {scores[0]:g} in every row, so there is nothing to tell apart")
    return scores


def _load(options: FinetuneOptions) -> SentenceEncoder:
    if not options.model:
        raise ConfigError("model is missing: a folder, a hub id, or all-MiniLM-L6-v2")
    encoder = SentenceEncoder(options.model, dtype="float32", device="cpu")
    if is_quantized(encoder.model):
        raise ConfigError(
            f"{options.model} has weights in int8, which cannot be trained: give the one it was made from"
        )
    if options.pooling:
        if encoder.folder is not None and (encoder.folder / "modules.json").is_file():
            own = ", ".join(encoder.recipe.pooling)
            raise ConfigError(f"{options.model} says itself how its tokens are pooled ({own}): leave pooling out")
        encoder.recipe.pooling = (options.pooling,)
    if encoder.prompt() and not encoder.recipe.prompt_is_pooled:
        raise ConfigError(f"{options.model} leaves its prompt out of the mean: such a model is not trained here")
    return encoder


def _dims(options: FinetuneOptions, full: int) -> tuple[int, ...]:
    """The sizes of vectors that are trained, the largest first; none where only whole vectors are."""
    if not all(text.isdecimal() for text in options.dims):
        raise ConfigError(f"dims is {' '.join(options.dims)}; it must be whole numbers")
    dims = sorted({int(text) for text in options.dims}, reverse=True)
    if dims and (dims[0] != full or dims[-1] < 1):
        raise ConfigError(f"dims is {', '.join(map(str, dims))}; they go from {full}, the model's own, down to 1")
    return tuple(dims)
