"""AdamW's steps of a table's rows that no gradient reaches: done later, with the bits that they would have had."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from isas import CPU_BACKENDS, backend_with_isa
from seeds import torch_generator

from fastbert import ops
from fastbert.training.optimizers import AdamW

ROWS, STEPS = 60, 70  # more steps than a history has room for at first
HYPER = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6}


@pytest.fixture(params=CPU_BACKENDS)
def backend(request):
    with backend_with_isa(request.param) as name:
        yield name


def looked_up(step: int) -> torch.Tensor:
    """A few rows of the first 50, some of them rare, one nearly always; the last ten never."""
    draw = torch_generator(step)
    often = torch.tensor([3] if step % 5 else [], dtype=torch.int64)
    return torch.cat([often, (50 * torch.rand(3, generator=draw) ** 3).long()]).unique()


def gradient_of(step: int, width: int) -> torch.Tensor:
    draw = torch_generator(1000 + step)
    rows = looked_up(step)
    values = torch.randn(len(rows), width, generator=draw)
    return torch.sparse_coo_tensor(rows[None], values, (ROWS, width), is_coalesced=True, check_invariants=False)


def start(width: int) -> list[list[torch.Tensor]]:
    weight = torch.randn(ROWS, width, generator=torch_generator(5))
    return [[weight], [torch.zeros_like(weight)], [torch.zeros_like(weight)], [torch.zeros(())]]


def trained(width: int, decay: float, backend: str, is_late: bool) -> list[torch.Tensor]:
    """Weight, mean and square after STEPS, in which the learning rate changes."""
    (weight, mean, square, steps) = start(width)
    late = ops.LateRows(weight[0])
    for step in range(STEPS):
        gradient = gradient_of(step, width)
        if is_late:
            ops.adamw_late(late, weight[0], mean[0], square[0], rows=looked_up(step).repeat(2), **HYPER)
        ops.adamw(
            weight, [gradient if is_late else gradient.to_dense()], mean, square, steps, rates=[1e-2 / (1 + step % 7)],
            decays=[decay], late=[late] if is_late else None, backend=backend, **HYPER,
        )  # fmt: skip
    assert not is_late or late.count == STEPS
    ops.adamw_late(late, weight[0], mean[0], square[0], **HYPER)
    assert late.count == 0 and not late.done.any()
    return [weight[0], mean[0], square[0]]


@pytest.mark.parametrize("width", (1, 64, 70, 200))
@pytest.mark.parametrize("decay", (0.0, 0.1))
def test_late_steps_have_the_bits_of_those_in_time(backend, width, decay):
    one, other = (trained(width, decay, backend, is_late) for is_late in (True, False))
    assert all(map(torch.equal, one, other))


def test_the_number_of_threads_changes_no_bit(backend):
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(trained(70, 0.1, backend, True))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_a_row_that_lacked_steps_when_it_was_looked_up_is_refused():
    """Its gradient is that of another row; nothing is changed."""
    weight, mean, square, steps = start(8)
    late = ops.LateRows(weight[0])
    given = {"rates": [1e-2], "decays": [0.1], "late": [late], "backend": "cpu", **HYPER}
    ops.adamw(weight, [gradient_of(1, 8)], mean, square, steps, **given)
    before = copy.deepcopy([weight, mean, square, steps])
    with pytest.raises(RuntimeError, match=r"row \d+ of weight 0 has a gradient from before it took all of its steps"):
        ops.adamw(weight, [gradient_of(2, 8)], mean, square, steps, **given)
    assert str(before) == str([weight, mean, square, steps]) and late.count == 1


def test_without_kernels_rows_do_first_what_they_lack():
    weight, mean, square, steps = start(8)
    late = ops.LateRows(weight[0])
    expected = start(8)
    for step, backend in enumerate(("cpu", "torch", "cpu")):
        given = {"rates": [1e-2], "decays": [0.1], "backend": backend, **HYPER}
        ops.adamw_late(late, weight[0], mean[0], square[0], rows=looked_up(step), **HYPER)
        ops.adamw(weight, [gradient_of(step, 8)], mean, square, steps, late=[late], **given)
        ops.adamw(expected[0], [gradient_of(step, 8).to_dense()], *expected[1:], **given)
    ops.adamw_late(late, weight[0], mean[0], square[0], **HYPER)
    assert torch.equal(weight[0], expected[0][0])


def leaf_and_optimizer() -> tuple[torch.nn.Parameter, AdamW]:
    leaf = torch.nn.Parameter(start(8)[0][0])
    optimizer = AdamW([leaf], lr=1e-2)
    for step in range(3):
        optimizer.catch_up(looked_up(step))
        leaf.grad = gradient_of(step, 8)
        optimizer.clip_and_step(0.0)
    return leaf, optimizer


@pytest.mark.parametrize("how", ("state_dict", "pickle", "dense gradient", "no gradient", "step"))
def test_whatever_else_reads_the_state_finds_it_whole(how):
    wanted, whole = leaf_and_optimizer()
    whole.catch_up()
    leaf, optimizer = leaf_and_optimizer()
    assert not torch.equal(leaf, wanted) and optimizer._late
    if how == "state_dict":
        found = optimizer.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(found, whole.state_dict()["state"][0]["exp_avg"])
    elif how == "pickle":
        assert torch.equal(pickle.loads(pickle.dumps(optimizer)).param_groups[0]["params"][0], wanted)
    else:
        dense = None if how == "no gradient" else gradient_of(3, 8).to_dense()
        for p, each in ((leaf, optimizer), (wanted, whole)):
            p.grad = dense
            each.step() if how == "step" else each.clip_and_step(0.0)
    assert torch.equal(leaf, wanted)


def test_bad_histories():
    weight, mean, square, _ = (each[0] for each in start(8))
    late = ops.LateRows(weight)
    late.count = 1
    late.history[0] = torch.tensor([1.0, 1e-2, 1.0])
    with pytest.raises(RuntimeError, match="rows are not below 60"):
        ops.adamw_late(late, weight, mean, square, rows=torch.tensor([1, 60]), **HYPER)
    late.done[7] = 2
    with pytest.raises(RuntimeError, match="a row has had 2 of 1 steps"):
        ops.adamw_late(late, weight, mean, square, **HYPER)
    late.done = late.done[:3]
    with pytest.raises(RuntimeError, match=r"done has shape \[3\]"):
        ops.adamw_late(late, weight, mean, square, **HYPER)
    late.history = late.history[:0]
    late.done = torch.zeros(ROWS, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="the history has shape"):
        ops.adamw_late(late, weight, mean, square, **HYPER)
