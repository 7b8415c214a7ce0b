"""AdamW's step over flat buffers, which is for GPUs, on a CPU: torch's own step and clipping, by the error rule."""

from __future__ import annotations

import copy

import pytest
import torch
from seeds import manual_seed
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from fastbert.testing.numerics import assert_close_to_reference
from fastbert.training import optimizers
from fastbert.training.optimizers import AdamW, clip_and_step

NORMS = (0.1, 100.0, 0.0, 1.0)


def make(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, AdamW]:
    """Behind a first step: a state is there."""
    manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    gradients = gradients_of(model)
    model.to(dtype)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 2e-2},
    ]
    optimizer = AdamW(groups, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, fused=True)
    give(model, gradients)
    optimizer.step()
    return model, optimizer


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [torch.randn_like(p, dtype=torch.float32) for p in model.parameters()]


def give(model: nn.Module, gradients: list[torch.Tensor]) -> None:
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient.to(p.dtype, copy=True)


def torchs_step(optimizer: AdamW, max_norm: float) -> torch.Tensor:
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.get_total_norm([p.grad for p in weights])
    if max_norm:
        nn.utils.clip_grad_norm_(weights, max_norm)
    optimizer.step()
    return norm if max_norm else torch.full_like(norm, torch.nan)


def run(dtype: torch.dtype, step) -> list[torch.Tensor]:
    """Norms, weights and the state behind four steps."""
    model, optimizer = make(dtype)
    norms = []
    for max_norm in NORMS:
        give(model, gradients_of(make()[0]))
        norms.append(step(optimizer, max_norm))
    states = [optimizer.state[p] for p in model.parameters()]
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    assert {float(state["step"]) for state in states} == {1.0 + len(NORMS)}
    assert norms.pop(2).isnan()  # where nothing is clipped it is not asked for
    return [torch.stack(norms), *[p.detach() for p in model.parameters()], *moments]


def test_it_is_torchs_step():
    found = run(torch.float32, lambda optimizer, max_norm: optimizer.step_flat(max_norm))
    oracle, near = run(torch.float64, torchs_step), run(torch.float32, torchs_step)
    for actual, exact, baseline in zip(found, oracle, near, strict=True):
        assert_close_to_reference(actual, exact.to(torch.float64), baseline)


def continued(flat_steps: int, loads: bool = False) -> list[torch.Tensor]:
    """Weights behind so many flat steps, and torch's own up to four; a loaded state in between."""
    model, optimizer = make()
    for number in range(4):
        give(model, gradients_of(make()[0]))
        if loads and number == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if number < flat_steps:
            optimizer.step_flat(0.5)
        else:
            torchs_step(optimizer, 0.5)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("loads", (False, True))
def test_torchs_own_step_goes_on_with_its_state(loads):
    """And so does it behind one that has loaded a state."""
    for flat_steps in (2, 4):
        for found, expected in zip(continued(flat_steps, loads), continued(0), strict=True):
            assert_close_to_reference(found, expected.double(), expected)


def no_gradient(model: nn.Module, optimizer: AdamW) -> None:
    model[1].weight.grad = None


def no_state(model: nn.Module, optimizer: AdamW) -> None:
    del optimizer.state[model[1].weight]


def sparse(model: nn.Module, optimizer: AdamW) -> None:
    model[1].weight.grad = model[1].weight.grad.to_sparse()


def of_another_dtype(model: nn.Module, optimizer: AdamW) -> None:
    model[1].bias.data = model[1].bias.data.bfloat16()
    model[1].bias.grad = torch.zeros_like(model[1].bias)


def hooked(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.register_step_pre_hook(lambda *arguments: None)


def maximizing(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.param_groups[1]["maximize"] = True


def other_betas(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.param_groups[1]["betas"] = (0.8, 0.9)


def weights_and_gradients(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    return [p.detach() for p in model.parameters()], [p.grad for p in model.parameters()]


def to_dense(t: torch.Tensor) -> torch.Tensor:
    return t.to_dense() if t.is_sparse else t


CHANGES = (no_gradient, no_state, sparse, of_another_dtype, hooked, maximizing, other_betas)


@pytest.mark.parametrize("change", CHANGES)
def test_what_it_leaves_to_torch(change):
    model, optimizer = make()
    give(model, gradients_of(model))
    change(model, optimizer)
    weights, gradients = ([t if t is None else t.clone() for t in each] for each in weights_and_gradients(model))
    assert optimizer.step_flat(0.1) is None
    for found, expected in zip(weights_and_gradients(model), (weights, gradients), strict=True):
        assert all(a is b or torch.equal(to_dense(a), to_dense(b)) for a, b in zip(found, expected, strict=True))


def test_hooks_of_all_optimizers_are_called():
    model, optimizer = make()
    give(model, gradients_of(model))
    called: list[tuple] = []
    handle = register_optimizer_step_post_hook(lambda *arguments: called.append(arguments))
    try:
        optimizer.step_flat(0.1)
    finally:
        handle.remove()
    assert called == [(optimizer, (optimizer,), {})]


class Waits(TorchDispatchMode):
    """Counts what a GPU would be waited for."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_only_the_first_step_asks_how_many_there_were():
    """Of each of 6 weights, on the device; and the number that all have is taken over."""
    model, optimizer = make()
    counts = []
    for _ in range(3):
        give(model, gradients_of(make()[0]))
        with Waits() as waits:
            assert optimizer.step_flat(0.0) is not None
        counts.append(waits.count)
    assert counts == [7, 0, 0]


def test_a_step_that_is_not_on_a_cpu_takes_it(monkeypatch):
    model, optimizer = make()
    give(model, gradients_of(model))
    monkeypatch.setattr(optimizers, "is_on_cpu", lambda parameters: False)
    monkeypatch.setattr(optimizers, "first_to_serve", lambda op, p: op)
    monkeypatch.setattr(optimizer, "step", None)  # would be torch's
    assert clip_and_step(optimizer, 0.1).isfinite()
    assert all(p.grad is None for p in model.parameters())
