"""AdamW with rows that take their steps late beside torch's own in float64: options may be others at any step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from seeds import torch_generator
from torch.optim.lr_scheduler import OneCycleLR

from fastbert.testing.numerics import assert_close_to_reference
from fastbert.training.optimizers import AdamW, clip_and_step

ROWS, WIDTH, STEPS = 40, 16, 24


def rows_of(step: int) -> torch.Tensor:
    """Some rows come often, some rarely, the last ten never."""
    draw = torch_generator(step)
    return (30 * torch.rand(4, generator=draw) ** 2).long().unique()


def gradients_of(step: int) -> list[torch.Tensor]:
    """A table's, as rows, and that of a weight that all of a model has."""
    draw, rows = torch_generator(1000 + step), rows_of(step)
    values = torch.randn(len(rows), WIDTH, generator=draw)
    table = torch.sparse_coo_tensor(rows[None], values, (ROWS, WIDTH), is_coalesced=True, check_invariants=False)
    return [table, torch.randn(WIDTH, WIDTH, generator=draw)]


def one_cycle(optimizer: Any, step: int) -> None:
    if step == 0:
        optimizer.cycle = OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1)
    else:
        optimizer.cycle.step()


def each_group(**options: Callable[[int], Any]) -> Callable[[Any, int], None]:
    def change(optimizer: Any, step: int) -> None:
        for group in optimizer.param_groups:
            group |= {name: of_step(step) for name, of_step in options.items()}

    return change


def in_place(optimizer: Any, step: int) -> None:
    """A rate that is a tensor, written to while rows wait."""
    for group in optimizer.param_groups:
        if step == 0:
            group["lr"] = torch.tensor(1e-2)
        group["lr"].mul_(0.9)


def of_one_group(**options: Any) -> Callable[[Any, int], None]:
    def change(optimizer: Any, step: int) -> None:
        if step == 9:
            optimizer.param_groups[1] |= options

    return change


def count_again(optimizer: Any, step: int) -> None:
    """As who begins a schedule anew: the bias correction is that of the first steps."""
    if step in (7, 15):
        for state in optimizer.state.values():
            state["step"].fill_(1.0)


def new_state(optimizer: Any, step: int) -> None:
    if step in (7, 15):
        optimizer.state.clear()


def load(optimizer: Any, step: int) -> None:
    """The state of some steps before, into the weights of now."""
    if step == 5:
        optimizer.before = optimizer.state_dict()
    elif step == 11:
        optimizer.load_state_dict(optimizer.before)


CHANGES = {
    "one cycle": one_cycle,
    "betas": each_group(betas=lambda step: (0.8 + 0.15 * (step % 2), (0.99, 0.999)[step % 3 == 0])),
    "eps": each_group(eps=lambda step: 10.0 ** -(2 + step % 6)),
    "lr": each_group(lr=lambda step: 1e-2 / (1 + step % 5)),
    "lr, a tensor": in_place,
    "weight_decay": each_group(weight_decay=lambda step: 0.1 * (step % 3)),
    "maximize": each_group(maximize=lambda step: step % 8 > 4),
    "betas of one group": of_one_group(betas=(0.5, 0.9)),
    "eps of one group": of_one_group(eps=1e-3),
    "the count of steps": count_again,
    "no state": new_state,
    "a state loaded": load,
}


def trained(kind: type, dtype: torch.dtype, change: Callable[[Any, int], None], **options: Any) -> list[torch.Tensor]:
    """The rows that each step looks up, and all weights at the end."""
    draw, seen = torch_generator(5), list[torch.Tensor]()
    weights = [torch.nn.Parameter(torch.randn(n, WIDTH, generator=draw).to(dtype)) for n in (ROWS, WIDTH)]
    optimizer = kind([{"params": [w]} for w in weights], lr=1e-2, weight_decay=0.1, **options)
    for step in range(STEPS):
        change(optimizer, step)
        is_deferred = isinstance(optimizer, AdamW)
        if is_deferred:
            optimizer.catch_up(rows_of(step))
        seen.append(weights[0].detach()[rows_of(step)])
        for weight, gradient in zip(weights, gradients_of(step), strict=True):
            weight.grad = (gradient if is_deferred or not gradient.is_sparse else gradient.to_dense()).to(dtype)
        clip_and_step(optimizer, 0.0) if is_deferred else optimizer.step()
    if is_deferred:
        optimizer.catch_up()
    return [torch.cat(seen), *(weight.detach() for weight in weights)]


@pytest.mark.parametrize("name", CHANGES)
def test_options_that_change_in_mid_run(name):
    change = CHANGES[name]
    found = trained(AdamW, torch.float32, change)
    exact = trained(torch.optim.AdamW, torch.float64, change)
    baseline = trained(torch.optim.AdamW, torch.float32, change)
    for ours, oracle, theirs, what in zip(found, exact, baseline, ("looked up", "table", "weight"), strict=True):
        assert_close_to_reference(ours, oracle, theirs, name=what)


def test_capturable_is_of_no_account_on_a_cpu():
    """torch's own step refuses it there."""
    found = trained(AdamW, torch.float32, lambda optimizer, step: None, capturable=True)
    assert all(map(torch.equal, found, trained(AdamW, torch.float32, lambda optimizer, step: None)))


def test_amsgrad():
    def nothing(optimizer: Any, step: int) -> None:
        pass

    runs = [
        trained(kind, dtype, nothing, amsgrad=True)
        for kind, dtype in (
            (AdamW, torch.float32),
            (torch.optim.AdamW, torch.float64),
            (torch.optim.AdamW, torch.float32),
        )
    ]
    for ours, oracle, theirs in zip(*runs, strict=True):
        assert_close_to_reference(ours, oracle, theirs)
