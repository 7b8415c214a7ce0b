"""Gradient checkpointing of an accelerated model gains memory: the peak of a step, counted by the allocator."""

# ruff: noqa: F811  (a fixture that is imported is also an argument)
from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hf import config_for, make_hf
from seeds import manual_seed, torch_generator
from test_accelerate import no_fallback, one_thread  # noqa: F401
from torch.profiler import ProfilerActivity, profile

import fastbert

LAYERS = 8
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": LAYERS, "max_position_embeddings": 64}
LENGTHS = torch.tensor([64, 5, 40, 22, 64, 9, 13, 31])
IDS = torch.randint(5, 43, (8, 64), generator=torch_generator(0))
INPUTS = {"input_ids": IDS, "attention_mask": (torch.arange(64) < LENGTHS[:, None]).long()}


def peak_bytes(run: Callable[[], None]) -> int:
    """How many bytes were in use at most that were not before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def train(model, checkpoints: bool, is_accelerated: bool, reentrant: bool = False) -> tuple:
    """(peak of a step, its loss and the layers' gradients, with the dropout masks of one seed)."""
    model = copy.deepcopy(model).train()
    if is_accelerated:
        fastbert.accelerate(model)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    losses: list[torch.Tensor] = []

    def step() -> None:
        manual_seed(7)
        loss = model(**INPUTS, labels=torch.arange(8) % 3).loss
        loss.backward()
        losses.append(loss.detach())

    step()  # gradients, and what is kept of the weights, are there from now on
    model.zero_grad(set_to_none=False)
    peak = peak_bytes(step)
    return peak, [losses[-1], *(p.grad for name, p in model.named_parameters() if ".layer." in name)]


@pytest.mark.parametrize("dropout", (0.0, 0.1))
def test_the_peak_of_a_step_falls(dropout, no_fallback):
    """To what one layer needs and what stands between layers; below transformers', too. Losses and gradients stay."""
    options = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = make_hf(config_for("bert", "SequenceClassification", **SIZES | options), "SequenceClassification")
    whole, expected = train(model, False, True)
    theirs, _ = train(model, True, False)
    for reentrant in (False, True):
        least, found = train(model, True, True, reentrant)
        assert least < 0.4 * whole and least < 0.8 * theirs, (least, whole, theirs)
        assert len(found) == 1 + 16 * LAYERS and all(map(torch.equal, found, expected))
