"""Layers as one op called again: who has to meet the registered op, what cannot be called again, and what fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from layer_specs import Layer, fused
from replayed_layers import (
    OFFSETS,
    OPS,
    Step,
    expected_of,
    know_nothing,
    launch_on_addresses,
    layers_of,
    plainly,
    recorded,
    x_of,
)
from seeds import manual_seed
from torch.utils._python_dispatch import TorchDispatchMode
from trained_layers import Several, assert_same

from fastbert.backend import use_backend
from fastbert.native.availability import triton_error
from fastbert.ops import _layer_replay, _recorded_calls

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch) -> None:
    know_nothing(monkeypatch)


# --------------------------------------------------------------------------------------------------------------------
# Who meets the registered op


@pytest.fixture
def known() -> list[Layer]:
    """Layers whose calls have been recorded."""
    layers = layers_of("post, alike")[:1]
    for step in range(3):
        Step.of(layers, step).gradients()
    assert recorded()
    return layers


def test_who_takes_what_is_saved_gets_all_of_it(known, monkeypatch):
    saved: list[torch.Size] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t.shape)
        return t.clone()

    def step() -> Step:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return Step.of(known, 5)

    plainly(monkeypatch, step)
    expected = [*saved]
    found = step().gradients()
    assert saved == expected and len(saved) > 10
    assert_same(found, expected_of(monkeypatch, known, 5))


def test_who_looks_at_operators_sees_it(known):
    seen = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **kwargs or {})

    with Look():
        Step.of(known, 5).gradients()
    names = {name.partition(".")[2] for name in seen if "encoder_layers" in name}
    assert names == {"encoder_layers_fwd_triton.default", "encoder_layers_bwd_triton.default"}


def test_who_looks_at_launches_sees_all(known, monkeypatch):
    from fastbert.kernels import launching

    monkeypatch.setattr(launching, "surroundings", lambda device: None)
    with monkeypatch.context() as m:
        m.setattr(_recorded_calls.Calls, "run", None)
        found = Step.of(known, 5).gradients()
    assert_same(found, expected_of(monkeypatch, known, 5))
    (one,) = recorded()
    assert one._forward is not None
    one._forward.kernels = [SimpleNamespace(pre_run_hooks=[print])]
    assert one.is_watched


def test_tensors_at_odd_addresses(known, monkeypatch):
    """Kernels were compiled for others."""
    launch_on_addresses(monkeypatch)

    def moved(t: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(t.numel() + 1, dtype=t.dtype)
        return memory[1:].view(t.shape).copy_(t)

    def grads(x: torch.Tensor, cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.detach().requires_grad_()
        mine = [layer.map(lambda t: t.detach().requires_grad_()) for layer in known]
        manual_seed(0)
        with use_backend("triton"):
            out = fused(OPS[0], mine, x, cu_seqlens=OFFSETS)
            found = torch.autograd.grad(out, [x, *Several(mine).tensors().values()], cotangent)
        return {"out": out.detach(), **{str(i): t for i, t in enumerate(found)}}

    x, cotangent = x_of(0), x_of(1)
    expected = plainly(monkeypatch, lambda: grads(x, cotangent))
    for step in range(6):
        given = moved(x) if step % 2 else x, moved(cotangent) if step > 3 else cotangent
        assert given[0].data_ptr() % 16 == 4 * (step % 2)
        assert_same(grads(*given), expected)
    assert len(recorded()) == 2  # and that of `known`


# --------------------------------------------------------------------------------------------------------------------
# What cannot be called again, and what fails


def test_an_operator_that_nobody_knows(monkeypatch):
    layers = layers_of("post, alike")[:1]
    monkeypatch.delitem(_recorded_calls._AGAIN, torch.ops.aten.addmm.out)
    for step in range(4):
        assert_same(Step.of(layers, step).gradients(), expected_of(monkeypatch, layers, step))
        assert not recorded()
    assert [*_layer_replay._known.values()] == [None]


def test_a_call_that_fails_is_not_called_again(known, monkeypatch):
    (one,) = recorded()
    for direction in ("_forward", "_backward"):
        (one,) = recorded()
        calls = getattr(one, direction)._calls

        def fail(*arguments, **options):
            raise RuntimeError("no memory")

        calls[len(calls) // 2] = (fail, *calls[len(calls) // 2][1:])
        with pytest.raises(RuntimeError, match="no memory"):
            Step.of(known, 5).gradients()
        assert not recorded()
        for step in (6, 7):
            assert_same(Step.of(known, step).gradients(), expected_of(monkeypatch, known, step))


def test_tensors_that_a_recording_does_not_go_by():
    a, b = torch.randn(2, 3, 3)

    def of(given, results=lambda out: [out], made=lambda: torch.empty(3, 3)) -> _recorded_calls.Calls:
        with _recorded_calls.Recording() as recording:
            out = torch.mm(a, b, out=made())
        assert recording.reason is None
        return _recorded_calls.Calls(recording, given, results(out))

    assert torch.equal(of([a, b.contiguous()]).run([b, a])[0], b @ a)
    with pytest.raises(ValueError, match="neither given nor made"):
        of([a])
    with pytest.raises(ValueError, match="part of another"):
        of([a, b, a[:2]])
    with pytest.raises(ValueError, match="by itself"):
        of([a, b], results=lambda out: [out[:2]])
    with pytest.raises(ValueError, match="by itself"):
        of([a, b], results=lambda out: [a])
    with _recorded_calls.Recording() as recording:
        a + b
    assert recording.reason is not None and "aten.add.Tensor" in recording.reason
