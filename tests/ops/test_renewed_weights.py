"""ops.adamw packs the weights that it writes: their products are those of weights that were packed on first use."""

from __future__ import annotations

import mmap

import pytest
import torch
from full import thinned
from isas import PACKED, backend_with_isa
from seeds import torch_generator

from fastbert import ops
from fastbert.native.availability import extension_error
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

if extension_error() is not None:
    pytest.skip(extension_error(), allow_module_level=True)
from fastbert import _C

ROWS = _C.most_rows_without_copy + 8  # for which a weight has copies

SHAPES = ((128, 96), (150, 330), (63, 65), (64, 7), (1, 64), (1, 1), (65, 1))
HIDDEN = (3, 5)  # an element that is none of those sampled at each call


@pytest.fixture(params=PACKED)
def isa(request):
    with backend_with_isa(request.param):
        yield request.param


def weight_of(shape: tuple[int, int]) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, generator=torch_generator(3)))


def products(weight: torch.Tensor, autocast: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x w^T and the gradient of x, products with a weight and with its transpose; twice, so that both have copies."""
    first, second = (products_once(weight, autocast) for _ in range(2))
    assert all(map(torch.equal, first, second))
    return first


def products_once(weight: torch.Tensor, autocast: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch_generator(4)
    x = torch.randn(ROWS, weight.shape[1], generator=generator).requires_grad_()
    dout = torch.randn(ROWS, weight.shape[0], generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = ops.linear(x, weight, None, backend="cpu")
    (dx,) = torch.autograd.grad(out, x, dout.to(out.dtype))
    return out.detach(), dx


class Optimizer:
    def __init__(self, weight: torch.Tensor):
        self.weight, self.steps = weight, torch.zeros(())
        self.states = [torch.zeros_like(weight) for _ in range(2)]

    def step(self) -> None:
        generator = torch_generator(int(self.steps))
        gradient = torch.randn(self.weight.shape, generator=generator)
        (mean, square), each = self.states, {"rates": [0.1], "decays": [0.1]}
        ops.adamw(
            [self.weight],
            [gradient],
            [mean],
            [square],
            [self.steps],
            **each,
            beta1=0.9,
            beta2=0.99,
            eps=1e-8,
            max_norm=1.0,
            backend="cpu",
        )


def assert_new(actual, weight: torch.Tensor, autocast: bool, old) -> None:
    expected = products(weight.detach().clone(), autocast)  # other memory: packed from the beginning
    for one, other, before in zip(actual, expected, old, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, before)


@thinned(4)
@pytest.mark.parametrize("autocast", (False, True), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_after_a_step_are_those_of_the_new_weight(isa, shape, autocast):
    weight = weight_of(shape)
    optimizer, old = Optimizer(weight), products(weight, autocast)
    for _ in range(3):
        optimizer.step()
        new = products(weight, autocast)
        assert_new(new, weight, autocast, old)
        old = new


@thinned(4)
@pytest.mark.parametrize("autocast", (False, True), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("cuts", ((64, 128), (30, 64), (64, 101), (128, 129)), ids=str)
def test_parts_of_a_weight_are_followed_too(isa, cuts, autocast):
    """Gate and up in one weight are packed one by one."""
    weight = weight_of((200, 70))
    rows = [slice(0, cuts[0]), slice(*cuts), slice(cuts[1], None), slice(None)]
    optimizer, old = Optimizer(weight), [products(weight[part], autocast) for part in rows]
    for _ in range(2):
        optimizer.step()
        for part, before in zip(rows, old, strict=True):
            assert_new(products(weight[part], autocast), weight[part], autocast, before)


def weight_after_a_step(autocast: bool) -> torch.nn.Parameter:
    weight = weight_of((128, 96))
    products(weight, autocast)
    Optimizer(weight).step()
    return weight


@pytest.mark.parametrize("autocast", (False, True), ids=("float32", "bfloat16"))
def test_a_weight_is_not_packed_again_after_a_step(isa, autocast):
    kept = []
    for _ in range(3):  # few of 1,024 calls look at that place, and no two weights' in a row are those
        weight = weight_after_a_step(autocast)
        expected = products(weight.detach().clone(), autocast)
        weight.data[HIDDEN] += 100.0  # a write that leaves no trace: what is packed is from before it
        with ops.only_recorded_writes():
            kept.append(all(map(torch.equal, products_once(weight, autocast), expected)))
    assert sum(kept) >= 2


@pytest.mark.parametrize("autocast", (False, True), ids=("float32", "bfloat16"))
def test_an_unrecorded_write_after_a_step_is_seen(isa, autocast):
    """Pruned weights are set to zero again after each step."""
    weight = weight_after_a_step(autocast)
    old = products(weight, autocast)
    Optimizer(weight).step()
    weight.data[HIDDEN[0]] = 0.0
    assert_new(products(weight, autocast), weight, autocast, old)


@pytest.mark.parametrize("autocast", (False, True), ids=("float32", "bfloat16"))
def test_a_write_after_a_step_is_seen(isa, autocast):
    weight = weight_after_a_step(autocast)
    old = products(weight, autocast)
    with torch.no_grad():
        weight[HIDDEN] += 100.0
    assert_new(products(weight, autocast), weight, autocast, old)


def test_a_step_that_fails_leaves_no_copy_for_new(isa):
    weight, other = weight_of((128, 96)), weight_of((5, 3))
    old = products(weight, False)
    zeros = [[torch.zeros_like(w) for w in (weight, other)] for _ in range(2)]
    with pytest.raises(RuntimeError, match="gradient 1"):
        ops.adamw(
            [weight, other], [torch.ones(128, 96), torch.ones(4)], *zeros, [torch.zeros(()), torch.zeros(())],
            rates=[0.1, 0.1], decays=[0.0, 0.0], beta1=0.9, beta2=0.99, eps=1e-8, backend="cpu",
        )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(products(weight, False), old, strict=True))
    Optimizer(weight).step()
    assert_new(products(weight, False), weight, False, old)


def test_a_whole_line_of_a_gradient_and_its_rest_are_written(isa):
    """Gradients of weights go past the caches in whole lines, others by the element: the same numbers."""
    generator = torch_generator(5)
    x, dout = torch.randn(37, 192, generator=generator), torch.randn(37, 128, generator=generator)
    weight = weight_of((128, 192))
    ops.linear(x, weight, None, backend="cpu").backward(dout)
    narrow = weight_of((128, 191))
    ops.linear(x[:, :191], narrow, None, backend="cpu").backward(dout)
    assert torch.equal(weight.grad[:, :191], narrow.grad)
    assert_close_to_reference(weight.grad, dout.double().T @ x.double(), dout.T @ x, GRADIENT_FACTOR)


def test_two_gradients_of_one_weight_have_the_memory_of_the_last_two():
    """A weight that is multiplied by twice, or whose gradients are accumulated, asks for no new pages in each step."""
    weight, x, places, elsewhere = weight_of((1024, 1024)), torch.randn(9, 1024), [], []
    for _ in range(4):
        alive = [torch.autograd.grad(ops.linear(x, weight, None, backend="cpu").sum(), weight)[0] for _ in range(2)]
        places.append({gradient.data_ptr() for gradient in alive})
        del alive
        elsewhere.append(mmap.mmap(-1, weight.nbytes))  # takes the place of what is given back
    assert len(places[0]) == 2 and places == places[:1] * 4
