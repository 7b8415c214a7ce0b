"""ops.adamw: against AdamW as its authors wrote it, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from full import halved
from isas import WITHOUT_PRODUCTS, backend_with_isa
from seeds import torch_generator

from fastbert import ops
from fastbert.testing.numerics import assert_close_to_reference

SHAPES = ((300, 70), (1,), (5, 3, 7), (40_000,), (0,))
RATES, DECAYS = [1e-2, 2e-2, 0.0, 3e-2, 1e-2], [0.1, 0.0, 0.1, 0.3, 0.1]
BETAS, EPS = (0.9, 0.99), 1e-6


@pytest.fixture(params=("torch", *WITHOUT_PRODUCTS))
def backend(request):
    with backend_with_isa(request.param) as name:
        yield name


def gradients_of(step: int) -> list[torch.Tensor]:
    """Most rows of the first are zero, always the same ones but for one, which comes later."""
    generator = torch_generator(step)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    found[0][10:] = 0.0
    if step == 2:
        found[0][200] = 1.0
    return found


def start(dtype: torch.dtype) -> tuple[list[torch.Tensor], ...]:
    generator = torch_generator(9)
    weights = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    zeros = [[torch.zeros_like(w) for w in weights] for _ in range(2)]
    return weights, *zeros, [torch.zeros((), dtype=torch.float32) for _ in weights]


def by_the_paper(steps: int, max_norm: float) -> tuple[list[torch.Tensor], list[float]]:
    """Algorithm 2 of Loshchilov & Hutter, in float64, and the norms of the gradients."""
    weights, means, squares, _ = start(torch.float64)
    norms = []
    for t in range(1, steps + 1):
        gradients = [g.double() for g in gradients_of(t)]
        norms.append(math.sqrt(sum(float((g * g).sum()) for g in gradients)))
        clip = min(1.0, max_norm / norms[-1]) if max_norm else 1.0
        for w, m, s, g, rate, decay in zip(weights, means, squares, gradients, RATES, DECAYS, strict=True):
            m.mul_(BETAS[0]).add_(g * clip, alpha=1 - BETAS[0])
            s.mul_(BETAS[1]).add_((g * clip) ** 2, alpha=1 - BETAS[1])
            m_hat, s_hat = m / (1 - BETAS[0] ** t), s / (1 - BETAS[1] ** t)
            w.sub_(rate * (m_hat / (s_hat.sqrt() + EPS) + decay * w))
    return weights, norms


def steps_of(backend: str, steps: int, max_norm: float) -> tuple[list[torch.Tensor], list[float]]:
    state, norms = start(torch.float32), []
    for t in range(1, steps + 1):
        norm = ops.adamw(
            state[0],
            gradients_of(t),
            *state[1:],
            rates=RATES,
            decays=DECAYS,
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
            max_norm=max_norm,
            backend=backend,
        )
        norms.append(float(norm))
    assert all(float(count) == steps for count in state[3])
    return state[0], norms


@pytest.mark.parametrize("max_norm", (0.0, 1.0, 1e6))
def test_steps_are_those_of_the_paper(backend, max_norm):
    expected, norms = by_the_paper(5, max_norm)
    baseline, near = steps_of("torch", 5, max_norm)
    found, seen = steps_of(backend, 5, max_norm)
    for i, (ours, theirs, exact) in enumerate(zip(found, baseline, expected, strict=True)):
        if exact.numel():
            assert_close_to_reference(ours, exact, theirs, name=f"weight {i}")
    if max_norm:
        assert_close_to_reference(torch.tensor(seen), torch.tensor(norms).double(), torch.tensor(near))
    else:
        assert all(map(math.isnan, seen))


def test_it_is_torchs_optimizer(backend):
    weights = [w.requires_grad_() for w in start(torch.float32)[0]]
    groups = [{"params": [w], "lr": r, "weight_decay": d} for w, r, d in zip(weights, RATES, DECAYS, strict=True)]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS, fused=True)
    for t in range(1, 4):
        for w, g in zip(weights, gradients_of(t), strict=True):
            w.grad = g
        optimizer.step()
    expected, _ = by_the_paper(3, 0.0)
    for ours, theirs, exact in zip(steps_of(backend, 3, 0.0)[0], weights, expected, strict=True):
        if exact.numel():
            assert_close_to_reference(ours, exact, theirs.detach())


@pytest.mark.parametrize("betas", ((0.0, 0.999), (0.3, 0.999), (0.9, 0.0), (0.9, 0.3)), ids=str)
def test_a_small_gradient_after_large_ones(backend, betas):
    """Betas below a half, which a schedule may set: nearly all of the moments is new."""
    generator, exact = torch_generator(1), torch.float64
    gradient = 1e-4 * torch.randn(300, generator=generator)

    def state(dtype: torch.dtype) -> list[torch.Tensor]:
        draw = torch_generator(2)
        mean, noise = 1e3 * torch.randn(300, generator=draw), torch.rand(300, generator=draw)
        return [t.to(dtype) for t in (torch.zeros(300), mean, 1e6 * noise)]

    def moments(name: str) -> list[torch.Tensor]:
        weight, mean, square = state(torch.float32)
        ops.adamw(
            [weight],
            [gradient],
            [mean],
            [square],
            [torch.ones(())],
            rates=[0.1],
            decays=[0.0],
            beta1=betas[0],
            beta2=betas[1],
            eps=EPS,
            backend=name,
        )
        return [weight, mean, square]

    weight, mean, square = state(exact)
    mean.mul_(betas[0]).add_(gradient.to(exact), alpha=1 - betas[0])
    square.mul_(betas[1]).add_(gradient.to(exact) ** 2, alpha=1 - betas[1])
    root = (square / (1 - betas[1] ** 2)).sqrt() + EPS
    weight.sub_(0.1 * mean / (1 - betas[0] ** 2) / root)
    for name, *tensors in zip(
        ("weight", "mean", "square"), moments(backend), (weight, mean, square), moments("torch"), strict=True
    ):
        ours, oracle, theirs = (t / weight.abs() if name == "weight" else t for t in tensors)  # each counts alike
        assert_close_to_reference(ours, oracle, theirs, name=name)


def in_rows(gradient: torch.Tensor, how: str) -> torch.Tensor:
    """The same gradient, sparse in its first dimension; or with its halves added up; or sparse in all."""
    if how == "elements":
        return gradient.to_sparse()
    whole = gradient.to_sparse(1)
    return whole if how == "rows" else (whole * 0.5 + whole * 0.5)


@halved
@pytest.mark.parametrize("how", ("rows", "halves", "elements"))
@pytest.mark.parametrize("max_norm", (0.0, 1.0))
def test_a_sparse_gradient_is_what_it_would_be_whole(backend, max_norm, how, monkeypatch):
    """A table's: the rows that it has not take their step, too. Clipped, the norm's last bit may be another one."""
    draw = gradients_of

    def of_step(step: int) -> list[torch.Tensor]:
        first, *others = draw(step)
        return [in_rows(first * (step != 3), how), *others]

    def whole(step: int) -> list[torch.Tensor]:
        return [g.to_dense() if g.is_sparse else g for g in of_step(step)]

    monkeypatch.setitem(globals(), "gradients_of", whole)
    expected, norms = steps_of(backend, 4, max_norm)
    exact, exact_norms = by_the_paper(4, max_norm)
    monkeypatch.setitem(globals(), "gradients_of", of_step)
    found, seen = steps_of(backend, 4, max_norm)
    if not max_norm:
        assert all(map(torch.equal, found, expected)) and all(map(math.isnan, seen))
        return
    assert_close_to_reference(torch.tensor(seen), torch.tensor(exact_norms).double(), torch.tensor(norms))
    for i, tensors in enumerate(zip(found, exact, expected, strict=True)):
        if tensors[0].numel():
            assert_close_to_reference(*tensors, name=f"weight {i}")


@pytest.mark.parametrize("name", WITHOUT_PRODUCTS)
def test_the_norm_is_that_of_gradients_as_they_are_now(name):
    """Backward leaves the squares of what it wrote; what is written by `.data` or NumPy PyTorch does not count."""
    weight, zeros = torch.nn.Parameter(torch.randn(70, 40)), [torch.zeros(70, 40) for _ in range(2)]
    with backend_with_isa(name) as backend:
        ops.linear(torch.randn(5, 40), weight, None, backend=backend).square().sum().backward()
        weight.grad.data.mul_(3)
        weight.grad.numpy()[7] = 50
        norm = ops.adamw(
            [weight],
            [weight.grad],
            *([z] for z in zeros),
            [torch.zeros(())],
            rates=[0.1],
            decays=[0.0],
            beta1=0.9,
            beta2=0.99,
            eps=1e-8,
            max_norm=1.0,
            backend=backend,
        )
    assert_close_to_reference(norm, weight.grad.double().norm(), weight.grad.norm())


@pytest.mark.parametrize("name", WITHOUT_PRODUCTS)
def test_the_number_of_threads_changes_no_bit(name):
    with backend_with_isa(name) as backend:
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            one = steps_of(backend, 3, 1.0)
            torch.set_num_threads(3)
            three = steps_of(backend, 3, 1.0)
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, one[0], three[0])) and one[1] == three[1]


def test_a_gradient_that_is_no_number_shows(backend):
    state, gradients = start(torch.float32), gradients_of(1)
    gradients[3][17] = float("nan")
    common = {"rates": RATES, "decays": DECAYS, "beta1": 0.9, "beta2": 0.99, "eps": EPS, "backend": backend}
    assert math.isnan(ops.adamw(state[0], gradients, *state[1:], max_norm=1.0, **common))
    assert state[0][3].isnan().all() and state[0][1].isnan().all()


@pytest.mark.parametrize("change", (None, "in place", "added to", "another"))
@pytest.mark.parametrize("name", WITHOUT_PRODUCTS)
def test_the_norm_of_gradients_that_our_products_made(name, change):
    """Their squares were summed when they were written; not those of what is no longer what was written."""
    with backend_with_isa(name) as backend:
        leaf, x = torch.nn.Parameter(torch.randn(70, 130)), torch.randn(9, 130)
        for _ in range(2 if change == "added to" else 1):
            ops.linear(x, leaf, None, backend=backend).square().sum().backward()
        if change == "in place":
            leaf.grad[3] *= 10.0
        elif change == "another":
            leaf.grad = leaf.grad * 2.0
        zeros = [torch.zeros_like(leaf) for _ in range(2)]
        norm = ops.adamw(
            [leaf],
            [leaf.grad],
            *([each] for each in zeros),
            [torch.zeros(())],
            rates=[0.0],
            decays=[0.0],
            beta1=0.9,
            beta2=0.99,
            eps=EPS,
            max_norm=1.0,
            backend=backend,
        )
        assert_close_to_reference(torch.tensor(float(norm)), leaf.grad.double().norm(), leaf.grad.norm())


def test_nothing_to_do():
    common = {"rates": [], "decays": [], "beta1": 0.9, "beta2": 0.99, "eps": EPS}
    assert math.isnan(ops.adamw([], [], [], [], [], **common)) and ops.adamw(*[[]] * 5, max_norm=1.0, **common) == 0.0


def test_bad_input():
    state, common = start(torch.float32), {"beta1": 0.9, "beta2": 0.99, "eps": EPS, "backend": "cpu"}
    with pytest.raises(RuntimeError, match="5 weights, but other numbers"):
        ops.adamw(state[0], gradients_of(1), *state[1:], rates=RATES[:3], decays=DECAYS, **common)
    wrong = [*gradients_of(1)[:4], torch.zeros(3)]
    with pytest.raises(RuntimeError, match=r"gradient 4 has shape \[3\]"):
        ops.adamw(state[0], wrong, *state[1:], rates=RATES, decays=DECAYS, **common)
