"""Writes that PyTorch does not record are seen at the next call; test_deployed_weights.py has inference mode."""

from __future__ import annotations

import pytest
import torch
from full import thinned
from isas import OF_FLOATS, backend_with_isa
from seeds import torch_generator
from test_packed_weights import HIDDEN, IN, ROWS, call, each_dtype, expect_new, layer_of, set_element
from torch import nn

from fastbert import ops
from fastbert.native.availability import extension_error
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

if extension_error() is not None:
    pytest.skip(extension_error(), allow_module_level=True)
from fastbert import _C

# The first call with a weight packs it, the second takes its checksum, those behind them compare this.
each_call = pytest.mark.parametrize("calls", (1, 2, 3))
# Rows for which products pack on their way, read a copy, and pack for themselves.
each_rows = pytest.mark.parametrize("rows", (7, ROWS, _C.least_rows_without_copy))
each_isa = pytest.mark.parametrize("backend", OF_FLOATS)


def through_numpy(layer):
    weight = layer.weight.detach()
    if weight.dtype is torch.bfloat16:
        weight.view(torch.int16).numpy()[HIDDEN] = 0x42C8  # 100 in bfloat16
    else:
        weight.numpy()[HIDDEN] = 100


def through_dlpack(layer):
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(layer.weight.detach()))[HIDDEN] = 100


def through_a_storage(layer):
    size = layer.weight.element_size()
    layer.weight.untyped_storage()[(HIDDEN[0] * IN + HIDDEN[1]) * size + size - 1] = 65


def one_element(layer) -> torch.Tensor:
    return layer.weight.detach()[HIDDEN[0]].narrow(0, HIDDEN[1], 1)


def through_a_preserved_counter(layer):
    with torch.autograd._unsafe_preserve_version_counter(layer.weight):
        set_element(layer.weight)


UNRECORDED = {
    "data": lambda layer: layer.weight.data.__setitem__(HIDDEN, 100),
    "numpy": through_numpy,
    "dlpack": through_dlpack,
    "storage": through_a_storage,
    "preserved counter": through_a_preserved_counter,
    "apply_": lambda layer: one_element(layer).apply_(lambda x: 100),
    "map_": lambda layer: one_element(layer).map_(one_element(layer), lambda x, y: 100),
}


@thinned(3)
@each_dtype
@each_call
@pytest.mark.parametrize("write", UNRECORDED)
def test_an_unrecorded_write_is_seen_at_the_next_call(write, calls, dtype):
    layer = layer_of(dtype)
    for _ in range(2):
        for _ in range(calls):
            old = call(layer)
        UNRECORDED[write](layer)
        expect_new(layer, call(layer), old)
        layer.weight.data.neg_()


@each_dtype
def test_writes_of_both_kinds_in_turn_are_seen(dtype):
    """Where a version has had a second call, the next one's checksum is taken when it is packed."""
    layer = layer_of(dtype)
    for calls in (1, 2, 2, 1, 1, 3):
        for _ in range(calls):
            old = call(layer)
            layer.weight.data[HIDDEN] -= 3
            expect_new(layer, call(layer), old)
        old = call(layer)
        with torch.no_grad():
            layer.weight[HIDDEN] += 2
        expect_new(layer, call(layer), old)
        old = call(layer)
        with torch.no_grad():
            layer.weight[HIDDEN] += 2
        layer.weight.data[HIDDEN] -= 3
        expect_new(layer, call(layer), old)


@each_dtype
@pytest.mark.parametrize("element", ((0, 23), (63, 329), (64, 1), (127, 257), (130, 300), (149, 7), (149, 329)))
def test_every_part_of_a_weight_is_compared(element, dtype):
    layer = layer_of(dtype)
    for _ in range(3):
        old = call(layer)
    layer.weight.data[element] = 100
    expect_new(layer, call(layer), old)


@pytest.mark.parametrize("shape", ((1, 1), (1, 64), (64, 1), (3, 5), (65, 33), (200, 130)), ids=str)
@each_isa
def test_every_element_counts(backend, shape):
    """Of lines that are shorter and longer than what a checksum takes at a time."""
    weight, x = torch.randn(shape), torch.randn(ROWS, shape[1]).abs() + 1
    with backend_with_isa(backend) as chosen, torch.no_grad():
        old = [ops.linear(x, weight, None, backend=chosen) for _ in range(2)][-1]
        for i in torch.randperm(weight.numel())[:40].tolist():
            weight.data.view(-1)[i] += 8
            new = ops.linear(x, weight, None, backend=chosen)
            assert not torch.equal(new, old), i
            old = new
        assert torch.equal(old, ops.linear(x, weight.clone(), None, backend=chosen))


def prune_rows(weight):
    weight.data[[2, 70]] = 0


def prune_by_numpy(weight):
    weight.detach().numpy()[:, 4:9] = 0


def prune_by_a_mask(weight):
    weight.data.mul_(torch.rand(weight.shape, generator=torch_generator(5)) > 0.1)


PRUNE = (prune_rows, prune_by_numpy, prune_by_a_mask)


def products(
    weight: torch.Tensor, backend: str, autocast: bool = False, rows: int = ROWS
) -> tuple[torch.Tensor, torch.Tensor]:
    """x w^T, and the gradient of x: a product with the weight and one with its transpose."""
    generator = torch_generator(4)
    x = torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype).requires_grad_()
    dout = torch.randn(rows, weight.shape[0], generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = ops.linear(x, weight, None, backend=backend)
    (dx,) = torch.autograd.grad(out, x, dout.to(out.dtype))
    return out.detach(), dx


@thinned(4)
@pytest.mark.parametrize("rows, calls", ((7, 1), (ROWS, 1), (ROWS, 2), (ROWS, 3)))
@pytest.mark.parametrize("autocast", (False, True), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("prune", PRUNE)
@each_isa
def test_pruning_by_hand_is_seen_forward_and_backward(backend, prune, autocast, rows, calls):
    weight = nn.Parameter(torch.randn(150, 96))
    with backend_with_isa(backend) as chosen:
        for _ in range(calls):
            old = products(weight, chosen, autocast, rows)
        prune(weight)
        new = products(weight, chosen, autocast, rows)
        for seen, before, expected in zip(
            new, old, products(weight.detach().clone(), chosen, autocast, rows), strict=True
        ):
            assert torch.equal(seen, expected)
            assert not torch.equal(seen, before)
        if not autocast:
            exact = products(weight.detach().double(), "torch", rows=rows)
            baseline = products(weight.detach(), "torch", rows=rows)
            assert_close_to_reference(new[0], exact[0], baseline[0], OUTPUT_FACTOR)
            assert_close_to_reference(new[1], exact[1], baseline[1], GRADIENT_FACTOR)


def test_what_a_call_without_gradients_finds_is_new_in_backward_too():
    weight = nn.Parameter(torch.randn(150, 96))
    _, old = products(weight, "cpu")
    weight.data[3] = 0
    with torch.no_grad():
        for _ in range(2):
            ops.linear(torch.ones(ROWS, 96), weight, None, backend="cpu")
    _, dx = products(weight, "cpu")
    assert not torch.equal(dx, old) and torch.equal(dx, products(weight.detach().clone(), "cpu")[1])


def test_a_copy_that_is_made_late_is_of_the_same_weight_as_the_others():
    """Backward packs for the first time while the weight is something else than in the forwards around it."""
    weight, x = nn.Parameter(torch.randn(150, 96)), torch.randn(ROWS, 96, requires_grad=True)
    with torch.no_grad():
        for _ in range(2):
            ops.linear(x, weight, None, backend="cpu")
    out = ops.linear(x, weight, None, backend="cpu")
    kept = weight.data.clone()
    weight.data[3] = 0
    out.sum().backward()
    weight.data.copy_(kept)
    for seen, expected in zip(products(weight, "cpu"), products(kept, "cpu"), strict=True):
        assert torch.equal(seen, expected)


@each_call
def test_copies_of_parts_are_old_with_those_of_the_whole(calls):
    """Gate and up in one weight: forward packs each of them, backward both together."""
    weight, down = nn.Parameter(torch.randn(2 * 72, 40)), nn.Parameter(torch.randn(40, 72))

    def gradients(weight, down):
        x = torch.randn(ROWS, 40, generator=torch_generator(1)).requires_grad_()
        out = ops.feed_forward(x, weight, None, down, activation="silu", gated=True, backend="cpu")
        return out.detach(), *torch.autograd.grad(out.sum(), (x, weight, down))

    for _ in range(calls):
        old = gradients(weight, down)
    for one in (weight, down):
        one.data[70:75] *= -2  # of both halves
        one.data[5] = 0
    expected = gradients(weight.detach().clone().requires_grad_(), down.detach().clone().requires_grad_())
    for seen, other, before in zip(gradients(weight, down), expected, old, strict=True):
        assert torch.equal(seen, other) and not torch.equal(seen, before)


@thinned(4)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@each_rows
@each_isa
def test_finite_differences_are_those_of_the_weight(backend, rows, dtype):
    weight, x = torch.randn(150, 96).to(dtype), torch.randn(rows, 96).to(dtype)
    found: dict[str, list[torch.Tensor]] = {"actual": [], "oracle": [], "baseline": []}

    def add(sign: int) -> None:
        found["actual"].append(sign * ops.linear(x, weight, None, backend=chosen))
        found["oracle"].append(sign * (x.double() @ weight.double().T))
        found["baseline"].append(sign * (x @ weight.T))

    with backend_with_isa(backend) as chosen, torch.no_grad():
        for i in torch.randperm(weight.numel())[:8].tolist():
            add(-1)
            weight.data.view(-1)[i] += 16
            add(1)
            assert (found["actual"][-1] + found["actual"][-2]).any(), i
    differences = {name: torch.stack(each).view(8, 2, *each[0].shape).sum(1) for name, each in found.items()}
    assert_close_to_reference(factor=OUTPUT_FACTOR, **differences)
