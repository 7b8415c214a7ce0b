"""Steps on a batch with slack behind it, beside the same steps without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from fastbert.packed_inputs import PackedInputs
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

# What is behind the batch: tokens, and sequences, or tokens alone.
SLACK = {"all": (5, 2), "tokens": (3, 0)}


def with_capacity(packed: PackedInputs, kind: str = "all") -> PackedInputs:
    batch, (tokens, sequences) = packed["batch"], SLACK[kind]
    count = batch.batch_size + sequences * packed.get("num_choices", 1)
    return packed.with_capacity(batch.total_tokens + tokens, count, batch.max_seqlen + 2)


def in_float64() -> Any:
    """Within it the losses that run in float32, whatever comes, run in float64."""
    return mock.patch.object(torch.Tensor, "float", torch.Tensor.double)


@contextmanager
def without_nan() -> Iterator[None]:
    """No NaN on the way of gradients, either. Which call had one is not said: torch would write down the stack below
    every op of the forward pass, which takes six times as long as all else.
    """
    with mock.patch("torch.fx.traceback.format_stack", list), torch.autograd.set_detect_anomaly(True):
        yield


def step(of: Any, model: torch.nn.Module, given: Any, loss: Callable) -> tuple[torch.Tensor, torch.Tensor]:
    """loss(of, given), and all gradients of `model` in one row: some are 0, and what rounding leaves there is none."""
    model.zero_grad()
    with without_nan():
        found = loss(of, given)
        if found.requires_grad:  # else it has been run backward
            found.backward()
    return found.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_slack_adds_nothing(of: Any, packed: PackedInputs | list, loss: Callable, kind: str = "all") -> None:
    """`of`: a model, or a task, which has one. loss(of, packed), of a batch or a list of them, with slack by the error
    rule against that without.
    """

    def model(of: Any) -> torch.nn.Module:
        return of if isinstance(of, torch.nn.Module) else of.model

    exact = copy.deepcopy(of)
    for each in (model(exact), getattr(exact, "teacher", None)):
        if each is not None:
            each.double()
    oracle = step(exact, model(exact), packed, loss)
    padded = [with_capacity(each, kind) for each in packed] if isinstance(packed, list) else with_capacity(packed, kind)
    baseline, found = (step(of, model(of), given, loss) for given in (packed, padded))
    for name, *values in zip(("loss", "gradients"), found, oracle, baseline, strict=True):
        assert_close_to_reference(*values, GRADIENT_FACTOR, name)
