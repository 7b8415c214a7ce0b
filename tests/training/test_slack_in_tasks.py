"""Losses of every task: slack enters no mean and is no text's negative."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from full import left_to_full
from pretraining_runs import write_text
from seeds import manual_seed, torch_generator
from slack import assert_slack_adds_nothing, in_float64, step, with_capacity
from slack_tasks import FINETUNING, TASKS, make

from fastbert.backend import use_backend
from fastbert.packed_inputs import PackedInputs
from fastbert.sentences.pooling import pool
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference
from fastbert.training.finetuning import embedding_losses
from fastbert.training.pretraining import MaskedLM
from fastbert.training.pretraining.distil import hidden_and_scores
from fastbert.training.task import Task, Totals

datasets = pytest.importorskip("datasets")
POOLING_MODES = ("mean", "cls", "max", "mean_sqrt_len_tokens", "lasttoken", "weightedmean")
EMBEDDING = [name for name in FINETUNING if FINETUNING[name][1].get("task") == "embedding"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    datasets.disable_progress_bars()
    return write_text(tmp_path_factory.mktemp("slack") / "text.txt")


def totals_of(task: Task, packed: PackedInputs) -> list[float]:
    """As of a step of more batches."""
    return [2.0 * count + 1 for count in task.counts(packed)]


def exactly(task: Task) -> Any:
    """In float64 what runs in float32 otherwise, if the model is."""
    is_exact = next(task.model.parameters()).dtype is torch.float64
    return in_float64() if is_exact and not isinstance(task, MaskedLM) else contextlib.nullcontext()


def loss_of(task: Task, packed: PackedInputs, totals: Totals) -> torch.Tensor:
    """With the same draws of a generator's words each time."""
    manual_seed(0)
    task.model.train()
    with exactly(task):
        return task.loss(task.model, packed, totals)


@left_to_full(lambda p: p["name"] == "order")  # the loss of the next sentence
@pytest.mark.parametrize("name", TASKS)
def test_slack_adds_nothing(name, tmp_path, text):
    task, batch = make(name, tmp_path, text)
    packed = batch(0)
    totals = totals_of(task, packed)
    for slack in ("all", "tokens"):
        assert task.counts(with_capacity(packed, slack)) == task.counts(packed)
        assert_slack_adds_nothing(task, packed, lambda task, given: loss_of(task, given, totals), slack)


def test_what_a_teacher_makes_of_slack_is_not_read(tmp_path, text):
    """Here both models make zeros of it; a kernel may make anything."""
    task, batch = make("distilled", tmp_path, text)
    packed = with_capacity(batch(0))
    hidden, scores, targets = (t.detach() for t in hidden_and_scores(task.teacher, packed))
    is_real, is_labelled = packed["batch"].has_sequence()[:, None], (targets != -100)[:, None]
    other = hidden.where(is_real, 7.0), scores.where(is_labelled, torch.arange(scores.shape[1]))
    found, expected = (
        step(task, task.model, given, lambda task, given: task.model(packed, *given).loss)
        for given in (other, (hidden, scores))
    )
    assert not torch.equal(other[1], scores) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", EMBEDDING)
def test_backward_of_one_batch_is_its_loss(name, tmp_path, text):
    """Bit for bit, also under autocast, which is not for losses; with more batches slack adds nothing, either."""
    task, batch = make(name, tmp_path, text)

    def backward(task: Task, batches: list[PackedInputs], autocast: bool = False) -> torch.Tensor:
        with exactly(task):
            return task.backward(task.model, batches, [1.0], torch.autocast("cpu", torch.bfloat16, enabled=autocast))

    assert_slack_adds_nothing(task, [batch(0), batch(1)], backward)
    packed = with_capacity(batch(0))
    given = [packed["batch"].has_tokens(task.texts), *([packed["labels"]] if "labels" in packed else [])]

    def formula(task: Task, packed: PackedInputs, autocast: bool) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            vectors = task.model(packed)
        vectors = vectors.unflatten(0, (-1, task.texts))
        return embedding_losses.over_prefixes(lambda v: task.loss_of(v, *given), vectors, task.dims)

    for autocast in (False, True):
        expected = step(task, task.model, packed, lambda task, given, on=autocast: formula(task, given, on))
        found = step(task, task.model, [packed], lambda task, given, on=autocast: backward(task, given, on))
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("loss", ("ranking", "ranking both ways", "cosent", "cosine"))
def test_losses_of_vectors_with_slack_among_them(loss):
    """Those of the real examples alone, wherever they stand; nothing flows to the others, which are zeros."""
    generator = torch_generator(0)
    vectors, scores = torch.randn(7, 3, 8, generator=generator), torch.rand(7, generator=generator)
    is_real = torch.tensor([1, 0, 1, 1, 0, 1, 0]).bool()
    of = {
        "ranking": lambda v, real, scores: embedding_losses.ranking(v, real, 20.0, False),
        "ranking both ways": lambda v, real, scores: embedding_losses.ranking(v, real, 20.0, True),
        "cosent": lambda v, real, scores: embedding_losses.cosent(v, real, scores, 20.0),
        "cosine": embedding_losses.cosine,
    }[loss]

    def run(vectors: torch.Tensor, is_real: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = vectors.clone().requires_grad_()
        found = of(vectors, is_real, scores)
        found.backward()
        return found.detach(), vectors.grad

    found, gradient = run(vectors.where(is_real[:, None, None], 0.0), is_real, scores)
    alone = vectors[is_real], torch.ones(4, dtype=torch.bool), scores[is_real]
    with in_float64():
        oracle = run(alone[0].double(), *alone[1:])
    for values in zip((found, gradient[is_real]), oracle, run(*alone), strict=True):
        assert_close_to_reference(*values, GRADIENT_FACTOR)
    assert not gradient[~is_real].any()


@pytest.mark.parametrize("mode", POOLING_MODES)
def test_no_pooling_reads_slack(mode):
    """Not-a-number there reaches neither a vector nor a gradient."""
    offsets, generator = torch.tensor([0, 3, 3, 5, 5], dtype=torch.int32), torch_generator(0)
    hidden = torch.randn(8, 4, generator=generator)

    def run(hidden: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden.clone().requires_grad_()
        with use_backend("torch"):
            vectors = pool(hidden, offsets, (mode,))
        vectors.sum().backward()
        return vectors.detach(), hidden.grad

    expected, gradient = run(hidden[:5], offsets)
    poisoned = hidden.clone()
    poisoned[5:] = torch.nan
    found, theirs = run(poisoned, offsets)
    assert torch.equal(found, expected) and torch.equal(theirs[:5], gradient) and not theirs[5:].any()
    assert not found[1].any() and not found[3].any()
