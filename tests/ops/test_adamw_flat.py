"""ops.adamw_flat: against torch's AdamW in float64, and what a step reads from memory."""

from __future__ import annotations

import pytest
import torch
from seeds import torch_generator

from fastbert import ops
from fastbert.native.availability import triton_error
from fastbert.testing.numerics import assert_close_to_reference

SHAPES, GROUPS = ((50, 90), (1,), (2048,), (5, 3, 7), (0,)), (0, 1, 0, 2, 1)
RATES, DECAYS = [1e-2, 3e-2, 2e-2], [0.1, 0.0, 0.3]
BETAS, EPS = (0.9, 0.99), 1e-6
OPTIONS = {"beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS}


@pytest.fixture(params=("torch", "triton"))
def backend(request):
    if request.param == "triton" and triton_error() is not None:
        pytest.skip(triton_error())
    return request.param


def drawn(seed: int) -> list[torch.Tensor]:
    generator = torch_generator(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def torchs(steps: int, max_norm: float, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The weights after so many steps, and the norms of their gradients."""
    weights = [torch.nn.Parameter(w.to(dtype)) for w in drawn(0)]
    groups = [
        {"params": [w for w, of in zip(weights, GROUPS, strict=True) if of == group], "lr": rate, "weight_decay": decay}
        for group, (rate, decay) in enumerate(zip(RATES, DECAYS, strict=True))
    ]
    optimizer, norms = torch.optim.AdamW(groups, betas=BETAS, eps=EPS, foreach=False), []
    for step in range(1, steps + 1):
        for weight, gradient in zip(weights, drawn(step), strict=True):
            weight.grad = gradient.to(dtype)
        norms.append(torch.nn.utils.get_total_norm([w.grad for w in weights]))
        if max_norm:
            torch.nn.utils.clip_grad_norm_(weights, max_norm)
        optimizer.step()
    return [weight.detach() for weight in weights], norms


def fill(state: ops.FlatState, gradients: list[torch.Tensor]) -> None:
    for view, gradient in zip(state.views(state.gradients), gradients, strict=True):
        view.copy_(gradient)


def numbers_of(step: int, rates: list[float] = RATES) -> torch.Tensor:
    return torch.tensor(ops.step_numbers(step, rates, DECAYS, *BETAS))


@pytest.mark.parametrize("max_norm", (0.0, 1.0, 1e6))
def test_steps_are_those_of_adamw(backend, max_norm):
    weights = drawn(0)
    state, norms = ops.FlatState(weights, GROUPS), []
    for step in range(1, 4):
        fill(state, drawn(step))
        norms.append(ops.adamw_flat(state, numbers_of(step), max_norm=max_norm, backend=backend, **OPTIONS))
    (oracle, right_norms), (baseline, _) = torchs(3, max_norm, torch.float64), torchs(3, max_norm, torch.float32)
    for found, right, other in zip(weights, oracle, baseline, strict=True):
        assert_close_to_reference(found, right, other)
    for found, right in zip(norms, right_norms, strict=True):
        assert found.isnan() if not max_norm else abs(found.item() / right.item() - 1) < 1e-6


def test_what_lies_between_the_weights_stays_zero_and_gradients_become_it(backend):
    state = ops.FlatState(drawn(0), GROUPS)
    fill(state, drawn(1))
    ops.adamw_flat(state, numbers_of(1), backend=backend, **OPTIONS)
    assert not state.gradients.any()
    for buffer in (state.means, state.squares):
        inside = sum(view.count_nonzero() for view in state.views(buffer))
        assert buffer.count_nonzero() == inside > 0


def test_numbers_are_read_when_the_step_runs(backend):
    """One tensor, whose values change: what a captured step has."""
    once, anew = drawn(0), drawn(0)
    numbers = torch.zeros(2 + 2 * len(RATES))
    states = [ops.FlatState(once, GROUPS), ops.FlatState(anew, GROUPS)]
    for step in (1, 2):
        rates = [rate / step for rate in RATES]
        numbers.copy_(numbers_of(step, rates))
        for state, given in zip(states, (numbers, numbers_of(step, rates)), strict=True):
            fill(state, drawn(step))
            ops.adamw_flat(state, given, max_norm=1.0, backend=backend, **OPTIONS)
    assert all(map(torch.equal, once, anew))
    assert not torch.equal(once[0], drawn(0)[0])


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_a_gradient_that_is_no_number_spoils_all_weights_as_torch_does(backend, bad):
    weights = drawn(0)
    state = ops.FlatState(weights, GROUPS)
    gradients = drawn(1)
    gradients[2][7] = bad
    fill(state, gradients)
    norm = ops.adamw_flat(state, numbers_of(1), max_norm=1.0, backend=backend, **OPTIONS)
    assert not norm.isfinite()
    parameters = [torch.nn.Parameter(w) for w in drawn(0)]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    assert [w.isnan().sum() for w in weights] == [p.grad.isnan().sum() for p in parameters]


def test_weights_are_written_where_they_are_and_counted(backend):
    weights = drawn(0)
    state, versions = ops.FlatState(weights, GROUPS), [w._version for w in weights]
    assert state.is_of(weights)
    ops.adamw_flat(state, numbers_of(1), backend=backend, **OPTIONS)
    assert all(w._version > version for w, version in zip(weights, versions, strict=True))
    assert not state.is_of([weights[0].clone(), *weights[1:]])


def test_what_no_step_can_be_made_of():
    for weights, groups in (([], ()), ([torch.zeros(3)], (0, 1))):
        with pytest.raises(ValueError, match=f"there are {len(weights)} weights and {len(groups)} groups"):
            ops.FlatState(weights, groups)
    with pytest.raises(ValueError, match=r"weight 1 is torch\.float64 on cpu"):
        ops.FlatState([torch.zeros(3), torch.zeros(3).double()], (0, 0))
    with pytest.raises(ValueError, match="weight 0 is"):
        ops.FlatState([torch.zeros(4, 4).t()[:2]], (0,))
    with pytest.raises(ValueError, match="weight 0 lies on no multiple of 16"):
        ops.FlatState([torch.zeros(9)[1:]], (0,))
    state = ops.FlatState([torch.zeros(3)], (0,))
    with pytest.raises(ValueError, match=r"numbers is torch\.float32 \(5,\) on cpu; it must be float32 \(4,\) on cpu"):
        ops.adamw_flat(state, torch.zeros(5), **OPTIONS)
