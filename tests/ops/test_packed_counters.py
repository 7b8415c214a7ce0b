"""What tells that a packed weight is still the same: its counter, where it lies, who writes uncounted."""

from __future__ import annotations

import inspect

import pytest
import torch
from full import halved
from isas import packs
from test_deployed_weights import CALLS, calls_until_new, deployed, kept
from test_packed_weights import HIDDEN, call, expect_new, layer_of, set_element
from torch import nn

from fastbert import ops

# Optimizers, of which the fused ones count no version of what they write: an ordinary call reads all of the weight, one
# in inference mode has nothing but the hook behind the step.

each_mode = pytest.mark.parametrize("keep, see", ((call, call), (kept, deployed)), ids=("ordinary", "inference"))


def step(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    layer.weight.grad = torch.zeros_like(layer.weight)
    layer.weight.grad[HIDDEN] = 1
    optimizer.step()


@halved
@each_mode
@pytest.mark.parametrize("how", ({}, {"foreach": True}, {"fused": True}), ids=str)
@pytest.mark.parametrize("optimizer", (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad))
def test_an_optimizers_step_is_seen_at_once(optimizer, how, keep, see):
    layer = layer_of(torch.float32)
    steps = optimizer(layer.parameters(), lr=0.5, weight_decay=0.0, **how)
    for _ in range(3):
        old = keep(layer)
        step(layer, steps)
        expect_new(layer, see(layer), old)


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


@each_mode
@pytest.mark.parametrize("make", (cleared_by_a_hook, cleared_by_its_class))
def test_a_step_that_drops_its_gradients_is_seen_at_once(make, keep, see):
    """No gradient is left to tell what was written."""
    layer = layer_of(torch.float32)
    optimizer = make(layer.parameters())
    for _ in range(3):
        old = keep(layer)
        step(layer, optimizer)
        assert layer.weight.grad is None
        expect_new(layer, see(layer), old)


@each_mode
def test_a_compiled_fused_step_is_seen_at_once(keep, see):
    layer = layer_of(torch.float32)
    steps, old = torch.optim.SGD(layer.parameters(), lr=0.5, fused=True), keep(layer)
    layer.weight.grad = torch.zeros_like(layer.weight)
    layer.weight.grad[HIDDEN] = 1
    torch.compile(steps.step, backend="eager")()
    expect_new(layer, see(layer), old)


# Two counters of one memory, and one counter of two memories. A counter's value is known, not whose it is.


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_parameters_that_share_memory_count_apart(dtype):
    """Seen at once; in inference mode only where their versions differ, else within its calls."""
    first, second = layer_of(dtype), layer_of(dtype)
    second.weight = nn.Parameter(first.weight.data)
    old = call(first)
    set_element(second.weight)
    if second.weight._version == first.weight._version:
        set_element(second.weight)
    expect_new(second, call(second), old)
    expect_new(first, call(first), old)
    for see, value, most in ((call, 200, 1), (deployed, 300, CALLS)):
        for _ in range(2):
            old = see(first)
        write_without_a_count(second.weight, first.weight, value)
        assert calls_until_new(first, old, see) <= most
        expect_new(first, see(first), old)


def write_without_a_count(second: torch.Tensor, first: torch.Tensor, value: float) -> None:
    """To `second`, whose version ends as that of `first`, which has had none since."""
    with torch.no_grad():
        second[HIDDEN] = value
        while second._version < first._version:
            second[HIDDEN] = value
        while first._version < second._version:
            first.t_()  # counts, and leaves what is there
            first.t_()


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
        averaged.sub_(1)
        layer.weight.data = averaged
        expect_new(layer, call(layer), old)
        old = call(layer)
        layer.weight.data = trained
        averaged[HIDDEN] = value
        layer.weight.data = averaged
        expect_new(layer, call(layer), old)


@packs
def test_memory_that_moved_under_a_view_larger_than_it():
    """An expanded weight is larger than its storage may have copies: two reasons to drop them in one call."""
    base = torch.randn(1, 64)
    weight, x = base.expand(32, 64), torch.randn(3, 64)
    for _ in range(2):
        old = ops.linear(x, weight, None, backend="cpu")
    storage = base.untyped_storage()
    storage.resize_(0)
    taken = torch.empty(1, 64)  # takes the memory, so that the storage moves
    storage.resize_(256)
    base.copy_(torch.randn(1, 64))
    new = ops.linear(x, weight, None, backend="cpu")
    assert taken.data_ptr() != base.data_ptr() and not torch.equal(new, old)
    assert torch.equal(new, ops.linear(x, weight.clone(), None, backend="cpu"))
