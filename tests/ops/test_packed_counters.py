"""What tells that a packed weight is still the same: whose counter it is, where it lies, who writes uncounted."""

from __future__ import annotations

import inspect

import pytest
import torch
from test_packed_weights import HIDDEN, OUT, call, expect_new, layer_of, set_element
from torch import nn

from fastbert import ops

# Optimizers, of which the fused ones count no version of what they write.


def step(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    layer.weight.grad = torch.zeros_like(layer.weight)
    layer.weight.grad[HIDDEN] = 1
    optimizer.step()


@pytest.mark.parametrize("how", ({}, {"foreach": True}, {"fused": True}), ids=str)
@pytest.mark.parametrize("optimizer", (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad))
def test_an_optimizers_step_is_seen_at_once(optimizer, how):
    layer = layer_of(torch.float32)
    steps = optimizer(layer.parameters(), lr=0.5, weight_decay=0.0, **how)
    for _ in range(3):
        old = call(layer)
        step(layer, steps)
        expect_new(layer, call(layer), old)


class Clearing(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        inspect.unwrap(torch.optim.SGD.step)(self, closure)  # without the hooks that SGD's own instances put there
        self.zero_grad()


def cleared_by_a_hook(parameters) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters, lr=0.5, weight_decay=0.0, fused=True)
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.zero_grad())
    return optimizer


def cleared_by_its_class(parameters) -> torch.optim.Optimizer:
    return Clearing(parameters, lr=0.5, fused=True)


@pytest.mark.parametrize("make", (cleared_by_a_hook, cleared_by_its_class))
def test_a_step_that_drops_its_gradients_is_seen_at_once(make):
    """No gradient is left to tell what was written."""
    layer = layer_of(torch.float32)
    optimizer = make(layer.parameters())
    for _ in range(3):
        old = call(layer)
        step(layer, optimizer)
        assert layer.weight.grad is None
        expect_new(layer, call(layer), old)


def test_a_compiled_fused_step_is_seen_at_once():
    layer = layer_of(torch.float32)
    steps, old = torch.optim.SGD(layer.parameters(), lr=0.5, fused=True), call(layer)
    layer.weight.grad = torch.zeros_like(layer.weight)
    layer.weight.grad[HIDDEN] = 1
    torch.compile(steps.step, backend="eager")()
    expect_new(layer, call(layer), old)


# Two counters of one memory, and one counter of two memories.


def other(layer: nn.Module) -> torch.Tensor:
    weight = layer.weight.detach().clone()
    weight[HIDDEN] = 100
    return weight


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_parameters_that_share_memory_count_apart(dtype):
    """The second comes to the version at which the first was packed."""
    first, second = layer_of(dtype), layer_of(dtype)
    second.weight = nn.Parameter(first.weight.data)
    old = call(first)
    while second.weight._version < first.weight._version:
        set_element(second.weight)
    assert second.weight._version == first.weight._version > 0
    expect_new(second, call(second), old)
    expect_new(first, call(first), old)


def test_a_counter_that_died_is_no_other():
    """A new counter is likely where the last one was."""
    layer = layer_of(torch.float32)
    for value in range(100, 110):
        old = call(layer, layer.weight.data)
        layer.weight.data[HIDDEN] = value
        expect_new(layer, call(layer, layer.weight.data), old)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int8), ids=str)
def test_memory_that_was_written_while_a_parameter_was_elsewhere(dtype):
    """Averaged weights are exchanged so: p.data = averaged, evaluate, p.data = trained, train, average, and again."""
    layer = layer_of(dtype)
    trained, averaged = layer.weight.data, layer.weight.detach().clone()
    for value in (100, 101, 102):
        layer.weight.data = averaged
        old = call(layer)
        layer.weight.data = trained
        call(layer)
        averaged[HIDDEN] = value
        layer.weight.data = averaged
        expect_new(layer, call(layer), old)


def test_slices_of_memory_that_was_written_while_a_parameter_was_elsewhere():
    """Each of them by itself, and transposed, as a merged product and its gradient take them."""
    layer = layer_of(torch.float32)
    here, there = layer.weight.data, other(layer)

    def results() -> list[torch.Tensor]:
        x = torch.ones(3, OUT // 2)
        return [ops.linear(x, half.t(), None, backend="cpu") for half in layer.weight.detach().chunk(2)]

    old = results()
    layer.weight.data = there
    results()
    here[HIDDEN], here[HIDDEN[0] + OUT // 2, HIDDEN[1]] = 100, 100
    layer.weight.data = here
    for before, now, half in zip(old, results(), here.clone().chunk(2), strict=True):
        assert not torch.equal(before, now)
        assert torch.equal(now, ops.linear(torch.ones(3, OUT // 2), half.t(), None, backend="cpu"))


def test_memory_that_moved_under_a_view_larger_than_it():
    """An expanded weight is larger than its storage may have copies: two reasons to drop them in one call."""
    base = torch.randn(1, 64)
    weight, x = base.expand(32, 64), torch.randn(3, 64)
    old = ops.linear(x, weight, None, backend="cpu")
    storage = base.untyped_storage()
    storage.resize_(0)
    taken = torch.empty(1, 64)  # takes the memory, so that the storage moves
    storage.resize_(256)
    base.copy_(torch.randn(1, 64))
    new = ops.linear(x, weight, None, backend="cpu")
    assert taken.data_ptr() != base.data_ptr() and not torch.equal(new, old)
    assert torch.equal(new, ops.linear(x, weight.clone(), None, backend="cpu"))
