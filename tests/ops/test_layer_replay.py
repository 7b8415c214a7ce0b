"""Layers as one op called again on batches of a size that came before: the same bits as without that, and no memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from full import thinned
from layer_specs import WITH_HOLES, fused
from replayed_layers import (
    OFFSETS,
    OPS,
    STACKS,
    TOKENS,
    Step,
    assert_nothing_is_held,
    expected_of,
    know_nothing,
    launch_on_addresses,
    layers_of,
    memories,
    plainly,
    recorded,
    stepped,
    x_of,
)
from trained_layers import MODES, assert_same

from fastbert.backend import use_backend
from fastbert.native.availability import triton_error
from fastbert.ops import _layer_replay

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch) -> None:
    know_nothing(monkeypatch)


@pytest.fixture(params=("tensors", "addresses"))
def launched_on(request, monkeypatch) -> str:
    """What kernels are launched on: tensors, as the interpreter has it, or addresses, as on a GPU."""
    if request.param == "addresses":
        launch_on_addresses(monkeypatch)
    return str(request.param)


@thinned(7)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STACKS)
def test_steps_have_the_bits_of_plain_ones(name, mode, op, launched_on, monkeypatch):
    """The first one is plain, the second one recorded. Memory moves in between."""
    layers, others = layers_of(name, mode), []
    shared = {"positions": WITH_HOLES[:TOKENS]} if name == "modernbert" else {}
    for step in range(4):
        found = stepped(layers, step, op, mode, **shared)
        assert_same(found, plainly(monkeypatch, lambda s=step: stepped(layers, s, op, mode, **shared)))
        assert_nothing_is_held()
        others.append([torch.empty(size) for size in range(1, 200 * step, 7)])
    (one,) = recorded()
    assert one._forward is not None and one._backward is not None, one._reason


@pytest.mark.parametrize("mode", ("float32", "autocast"))
def test_without_dropout_and_a_gradient_of_x(mode, launched_on, monkeypatch):
    layers = layers_of("post, alike", dropouts=(0.0,) * 4)
    for step in range(6):
        found = stepped(layers, step, mode=mode, needs_dx=step < 3)
        assert_same(found, plainly(monkeypatch, lambda s=step: stepped(layers, s, mode=mode)))
    assert len(recorded()) == 2


@pytest.mark.parametrize("order", ((0, 1, 2), (2, 0, 1)))
def test_several_forwards_before_a_backward(order, launched_on, monkeypatch):
    layers = layers_of("post, alike")[:1]
    for turn in range(0, 9, 3):
        steps = [Step.of(layers, turn + i) for i in range(3)]
        for i in order:
            assert_same(steps[i].gradients(), expected_of(monkeypatch, layers, turn + i))
    assert len(recorded()) == 3
    assert_nothing_is_held()


def test_a_graph_that_is_retained(launched_on, monkeypatch):
    layers = layers_of("post, alike")[:1]
    for step in range(4):
        one = Step.of(layers, step)
        expected = expected_of(monkeypatch, layers, step)
        for _ in range(2):
            assert_same(one.gradients(retain_graph=True), expected)
        assert_same(one.gradients(), expected)
        assert_nothing_is_held()
        with pytest.raises(RuntimeError, match="second time"):
            one.gradients()


def test_a_backward_that_never_comes(launched_on, monkeypatch):
    layers = layers_of("post, alike")[:1]
    for step in range(4):
        one = Step.of(layers, step)
        kept = [] if step == 0 else [weakref.ref(memory) for memory in memories(one.out.grad_fn.recorded)]
        assert step == 0 or any(ref().storage.nbytes() for ref in kept)
        del one
        gc.collect()
        assert not any(ref() for ref in kept)
    for step in range(4, 7):
        assert_same(Step.of(layers, step).gradients(), expected_of(monkeypatch, layers, step))


def test_two_sizes_in_turn(launched_on, monkeypatch):
    layers = layers_of("pre")[:1]
    for step in range(6):
        offsets = OFFSETS if step % 2 else OFFSETS[:-1]
        found = stepped(layers, step, cu_seqlens=offsets)
        assert_same(found, plainly(monkeypatch, lambda s=step, o=offsets: stepped(layers, s, cu_seqlens=o)))
    assert len(recorded()) == 2


def test_few_sizes_are_known():
    layers = layers_of("post, alike")[:1]
    for tokens in range(1, _layer_replay._MOST + 9):
        offsets = torch.tensor([0, tokens], dtype=torch.int32)
        with use_backend("triton"):
            given = [layer.map(lambda t: t.detach().requires_grad_()) for layer in layers]
            fused(OPS[0], given, x_of(0, tokens), cu_seqlens=offsets)
    assert len(_layer_replay._known) == _layer_replay._MOST
    assert not recorded()
