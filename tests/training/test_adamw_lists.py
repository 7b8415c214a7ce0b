"""AdamW's step of lists, which is for GPUs, on a CPU: torch's own step and clipping, with their bits, or nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from seeds import manual_seed
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastbert.training.optimizers import AdamW, _clip_then_step


def make() -> tuple[nn.Module, AdamW]:
    """Behind a first step: a state is there."""
    manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 2e-2},
    ]
    optimizer = AdamW(groups, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, fused=True)
    differentiate(model)
    optimizer.step()
    return model, optimizer


def differentiate(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)


def test_it_is_torchs_step_by_its_bits():
    found = []
    for is_torchs in (False, True):
        model, optimizer = make()
        norms = []
        for max_norm in (0.1, 100.0, 0.0, 1.0):
            differentiate(model)
            if is_torchs:
                norm = torch.tensor(float("nan"))
                if max_norm:
                    norm = nn.utils.clip_grad_norm_(list(optimizer.state), max_norm, foreach=True)
                optimizer.step()
            else:
                norm = optimizer.clip_and_step_lists(max_norm)
            norms.append(norm)
        state = [t for p in model.parameters() for t in optimizer.state[p].values()]
        found.append([*norms, *model.parameters(), *[p.grad for p in model.parameters()], *state])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) or (one.isnan() and other.isnan())


def test_states_in_another_order():
    """As loading may leave them."""
    found = []
    for turned in (False, True):
        model, optimizer = make()
        if turned:
            entries = [*optimizer.state.items()][::-1]
            optimizer.state.clear()
            optimizer.state.update(entries)
        differentiate(model)
        assert optimizer.clip_and_step_lists(0.5) is not None
        found.append([*model.parameters()])
    assert all(map(torch.equal, *found))


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


def scaled(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.grad_scale = torch.ones(())


def option(name: str, value: object) -> Callable[[nn.Module, AdamW], None]:
    def change(model: nn.Module, optimizer: AdamW) -> None:
        optimizer.param_groups[1][name] = value

    return change


@pytest.mark.parametrize(
    "change",
    (
        no_gradient, no_state, sparse, of_another_dtype, hooked, scaled, option("fused", None),
        option("amsgrad", True), option("maximize", True), option("betas", (0.8, 0.9)),
        option("lr", torch.tensor(1e-2)),
    ),
)  # fmt: skip
def test_what_it_leaves_to_torch(change):
    """Nothing has been touched then."""
    model, optimizer = make()
    differentiate(model)
    change(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    assert optimizer.clip_and_step_lists(0.1) is None
    for p, kept, g in zip(model.parameters(), before, gradients, strict=True):
        assert torch.equal(p, kept) and (p.grad is None) == (g is None)
        assert g is None or torch.equal(p.grad.to_dense(), g.to_dense())


def test_a_step_that_is_not_on_a_cpu_takes_it(monkeypatch):
    model, optimizer = make()
    differentiate(model)
    monkeypatch.setattr(optimizer, "step", None)  # would be torch's
    assert _clip_then_step(optimizer, list(model.parameters()), 0.1).isfinite()


def test_hooks_behind_a_step_are_called():
    """Of this optimizer, and of all."""
    model, optimizer = make()
    differentiate(model)
    called = []
    optimizer.register_step_post_hook(lambda *arguments: called.append(arguments))
    handle = register_optimizer_step_post_hook(lambda *arguments: called.append(arguments))
    try:
        assert optimizer.clip_and_step_lists(0.1) is not None
    finally:
        handle.remove()
    assert called == [(optimizer, (optimizer,), {})] * 2


def test_gradients_are_dropped_or_zeroed():
    model, optimizer = make()
    differentiate(model)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
