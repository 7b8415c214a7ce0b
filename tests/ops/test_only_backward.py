"""`only_backward`: layers add their gradients to `.grad` themselves, with autograd's bits, or leave it to autograd."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from full import thinned
from layer_specs import fused
from replayed_layers import OFFSETS, OPS, Step, know_nothing, layers_of, x_of
from seeds import manual_seed
from torch import nn
from trained_layers import MODES, assert_same

from fastbert import ops
from fastbert.backend import use_backend
from fastbert.native.availability import triton_error
from fastbert.ops import promises

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch) -> None:
    know_nothing(monkeypatch)


def parameters_of(layers) -> dict[str, nn.Parameter]:
    named = (layer.tensors().items() for layer in layers)
    return {f"{name}, layer {i}": t for i, each in enumerate(named) for name, t in each}  # type: ignore[misc]


def trainable(name: str = "post", mode: str = "float32"):
    return [layer.map(lambda t: nn.Parameter(t.clone())) for layer in layers_of(name, mode)]


def forward(layers, step: int = 0, mode: str = "float32", op: str = OPS[0], needs_dx: bool = True):
    dtype = layers[0].linears[0].weight.dtype
    x = x_of(step).to(dtype).requires_grad_(needs_dx)
    manual_seed(step)
    with use_backend("triton"), torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        out = fused(op, layers, x, cu_seqlens=OFFSETS)
    return SimpleNamespace(x=x, out=out, cotangent=x_of(step + 100).to(out.dtype))


def backward(one, **options) -> None:
    with use_backend("triton"):
        one.out.backward(one.cotangent, **options)


def gradients_of(layers) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in parameters_of(layers).items()}


def is_left_to_autograd(out: torch.Tensor) -> bool:
    """Whether the graph knows the parameters."""
    return len([node for node, _ in out.grad_fn.next_functions if node is not None]) > 1


@thinned(4)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ("post", "pre", "rms"))
def test_two_batches_add_up_to_autograds_bits(name, mode, op):
    """Twice: the second time the layers are recorded."""
    found = []
    for word in (ops.only_backward, torch.enable_grad):
        layers = trainable(name, mode)
        for _ in range(2):
            for p in parameters_of(layers).values():
                p.grad = None
            inputs = []
            for step in range(2):
                with word():
                    one = forward(layers, step, mode, op)
                assert is_left_to_autograd(one.out) == (word is torch.enable_grad)
                backward(one)
                inputs.append(one.x.grad)
        found.append({**gradients_of(layers), "dx": torch.stack(inputs)})
    assert_same(*found)


def test_a_retained_graph_adds_twice():
    layers = trainable()
    with ops.only_backward():
        one = forward(layers)
    backward(one, retain_graph=True)
    once = gradients_of(layers)
    backward(one)
    assert_same(gradients_of(layers), {name: t + t for name, t in once.items()})


def test_some_have_a_gradient_already():
    found = []
    for word in (ops.only_backward, torch.enable_grad):
        layers = trainable()
        for p in [*parameters_of(layers).values()][::3]:
            p.grad = torch.ones_like(p)
        with word():
            one = forward(layers)
        backward(one)
        found.append(gradients_of(layers))
    assert_same(*found)


def test_a_parameter_that_two_layers_have():
    found = []
    for word in (ops.only_backward, torch.enable_grad):
        first, second = trainable("post, alike")
        second.linears[:] = first.linears
        with word():
            one = forward([first, second])
        backward(one)
        found.append(gradients_of([first, second]))
    assert_same(*found)


@pytest.mark.parametrize("hook", ("register_hook", "register_post_accumulate_grad_hook"))
def test_a_hook_is_called(hook):
    layers, seen = trainable(), []
    last = [*parameters_of(layers).values()][-1]
    handle = getattr(last, hook)(lambda t: seen.append(t.shape))
    with ops.only_backward():
        one = forward(layers)
    assert is_left_to_autograd(one.out)
    backward(one)
    assert seen == [last.shape]
    handle.remove()
    with ops.only_backward():
        one = forward(layers)
    assert not is_left_to_autograd(one.out)
    backward(one)
    assert len(seen) == 1 and last.grad is not None


def test_layers_above_frozen_embeddings_are_trained():
    layers = trainable()
    with ops.only_backward():
        one = forward(layers, needs_dx=False)
    assert is_left_to_autograd(one.out)
    backward(one)
    assert all(p.grad is not None for p in parameters_of(layers).values())


def test_weights_that_are_no_parameters_are_left_to_autograd():
    with ops.only_backward():
        one = Step.of(layers_of("post"), 0)
    assert is_left_to_autograd(one.out)
    assert all(t is not None for t in one.gradients().values())


def test_torch_autograd_grad_says_that_it_does_not_find_them():
    layers = trainable()
    with ops.only_backward():
        one = forward(layers)
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(one.out, [*parameters_of(layers).values()], one.cotangent)


def test_it_holds_inside_in_this_thread_alone():
    found = []

    def look() -> None:
        found.append(promises._here.only_backward)

    with pytest.raises(ZeroDivisionError), ops.only_backward():
        with ops.only_backward(False):
            look()
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        raise ZeroDivisionError
    look()
    assert found == [False, True, False, False]
