"""AdamW's steps of a table's rows that no gradient reaches: done later, with the bits that they would have had."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from full import thinned
from isas import WITHOUT_PRODUCTS, backend_with_isa
from seeds import torch_generator

from fastbert import ops
from fastbert.testing.numerics import assert_close_to_reference
from fastbert.training.optimizers import AdamW, clip_and_step

ROWS, STEPS = 60, 70  # more steps than a history has room for at first
HYPER = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6}


@pytest.fixture(params=WITHOUT_PRODUCTS)
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


def at(step: int, changes: bool) -> dict[str, float]:
    """The options of a step. beta1 goes round as OneCycleLR's does; with beta2 = 0.5 the mean outlives the square."""
    if not changes:
        return HYPER
    return {
        "beta1": 0.85 + 0.1 * (step % 9) / 8,
        "beta2": (0.999, 0.9, 0.5)[step // 10 % 3],
        "eps": 10.0 ** -(step % 5),
    }


def trained(width: int, decay: float, backend: str, is_deferred: bool, changes: bool = False) -> list[torch.Tensor]:
    """Weight, mean and square after STEPS, in which the learning rate changes, or all that a step goes by."""
    (weight, mean, square, steps) = start(width)
    deferred = ops.DeferredRows(weight[0], mean[0], square[0])
    for step in range(STEPS):
        gradient = gradient_of(step, width)
        if is_deferred:
            ops.adamw_deferred(deferred, rows=looked_up(step).repeat(2))
        ops.adamw(
            weight,
            [gradient if is_deferred else gradient.to_dense()],
            mean,
            square,
            steps,
            backend=backend,
            rates=[1e-2 / (1 + step % 7)],
            decays=[decay * (step % 3 if changes else 1)],
            deferred=[deferred] if is_deferred else None,
            **at(step, changes),
        )
    assert not is_deferred or deferred.count == STEPS
    ops.adamw_deferred(deferred)
    assert deferred.count == 0 and not deferred.done.any()
    return [weight[0], mean[0], square[0]]


@thinned(4)
@pytest.mark.parametrize("width", (1, 64, 70, 200))
@pytest.mark.parametrize("decay", (0.0, 0.1))
@pytest.mark.parametrize("changes", (False, True), ids=("constant", "changed"))
def test_deferred_steps_have_the_bits_of_those_in_time(backend, width, decay, changes):
    one, other = (trained(width, decay, backend, is_deferred, changes) for is_deferred in (True, False))
    assert all(map(torch.equal, one, other))


def moved_by_its_mean(kind: str, dtype: torch.dtype, backend: str = "torch") -> torch.Tensor:
    """One gradient, then steps without; beta2 is 0, so that the square is 0 at once, and the mean is not."""
    first, table = gradient_of(1, 70).to_dense().to(dtype), start(70)[0][0].to(dtype)
    options = {"lr": 1e-2, "betas": (0.9, 0.0), "eps": 1e-3, "weight_decay": 0.1}
    if kind == "theirs":
        leaf = torch.nn.Parameter(table)
        optimizer = torch.optim.AdamW([leaf], **options)
        for step in range(4):
            leaf.grad = first if step == 0 else torch.zeros_like(leaf)
            optimizer.step()
        return leaf.detach()
    (weight, mean, square, steps) = [table], [torch.zeros_like(table)], [torch.zeros_like(table)], [torch.zeros(())]
    deferred = ops.DeferredRows(weight[0], mean[0], square[0]) if kind != "in time" else None
    for step in range(4):
        gradient = first if step == 0 else torch.zeros_like(first)
        ops.adamw(
            weight,
            [gradient if deferred is None else gradient.to_sparse(1)],
            mean,
            square,
            steps,
            rates=[1e-2],
            decays=[0.1],
            beta1=0.9,
            beta2=0.0,
            eps=1e-3,
            deferred=None if deferred is None else [deferred],
            backend=backend,
        )
        if kind == "looked up" and step == 1:  # rows that wait from here on have no square any more
            ops.adamw_deferred(deferred)
    if deferred is not None:
        ops.adamw_deferred(deferred)
    return weight[0]


@pytest.mark.parametrize("kind", ("in time", "deferred", "looked up"))
def test_a_mean_that_outlives_its_square_moves_the_weight(backend, kind):
    exact, baseline = (moved_by_its_mean("theirs", dtype) for dtype in (torch.float64, torch.float32))
    assert_close_to_reference(moved_by_its_mean(kind, torch.float32, backend), exact, baseline)


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
    deferred = ops.DeferredRows(weight[0], mean[0], square[0])
    given = {"rates": [1e-2], "decays": [0.1], "deferred": [deferred], "backend": "cpu", **HYPER}
    ops.adamw(weight, [gradient_of(1, 8)], mean, square, steps, **given)
    before = copy.deepcopy([weight, mean, square, steps])
    with pytest.raises(RuntimeError, match=r"row \d+ of weight 0 has a gradient from before it took all of its steps"):
        ops.adamw(weight, [gradient_of(2, 8)], mean, square, steps, **given)
    assert str(before) == str([weight, mean, square, steps]) and deferred.count == 1


def test_without_kernels_rows_do_first_what_they_lack():
    weight, mean, square, steps = start(8)
    deferred = ops.DeferredRows(weight[0], mean[0], square[0])
    expected = start(8)
    for step, backend in enumerate(("cpu", "torch", "cpu")):
        given = {"rates": [1e-2], "decays": [0.1], "backend": backend, **HYPER}
        ops.adamw_deferred(deferred, rows=looked_up(step))
        ops.adamw(weight, [gradient_of(step, 8)], mean, square, steps, deferred=[deferred], **given)
        ops.adamw(expected[0], [gradient_of(step, 8).to_dense()], *expected[1:], **given)
    ops.adamw_deferred(deferred)
    assert torch.equal(weight[0], expected[0][0])


def leaf_and_optimizer() -> tuple[torch.nn.Parameter, AdamW]:
    leaf = torch.nn.Parameter(start(8)[0][0])
    optimizer = AdamW([leaf], lr=1e-2)
    for step in range(3):
        optimizer.catch_up(looked_up(step))
        leaf.grad = gradient_of(step, 8)
        clip_and_step(optimizer, 0.0)
    return leaf, optimizer


@pytest.mark.parametrize(
    "how", ("state_dict", "load", "pickle", "copy", "dense gradient", "no gradient", "no state", "step")
)
def test_whatever_else_reads_the_state_finds_it_whole(how):
    wanted, whole = leaf_and_optimizer()
    whole.catch_up()
    leaf, optimizer = leaf_and_optimizer()
    assert not torch.equal(leaf, wanted) and optimizer._deferred
    if how == "state_dict":
        found = optimizer.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(found, whole.state_dict()["state"][0]["exp_avg"])
    elif how == "load":
        optimizer.load_state_dict(AdamW([torch.nn.Parameter(torch.ones_like(leaf))]).state_dict())
    elif how in ("pickle", "copy"):
        made = copy.deepcopy(optimizer) if how == "copy" else pickle.loads(pickle.dumps(optimizer))
        assert torch.equal(made.param_groups[0]["params"][0], wanted)
    else:
        for p, each in ((leaf, optimizer), (wanted, whole)):
            p.grad = {"no gradient": None, "no state": gradient_of(3, 8)}.get(how, gradient_of(3, 8).to_dense())
            if how == "no state":
                each.state.clear()
            each.step() if how == "step" else clip_and_step(each, 0.0)
        optimizer.catch_up()
        whole.catch_up()
    assert torch.equal(leaf, wanted)


@pytest.mark.parametrize("what", ("weight", "mean", "data"))
def test_a_table_that_was_written_to_while_rows_waited_is_refused(what):
    leaf, optimizer = leaf_and_optimizer()
    with torch.no_grad():
        if what == "weight":
            leaf[3] = 0.0
        elif what == "mean":
            optimizer.state[leaf]["exp_avg"].zero_()
        else:
            leaf.data = leaf.data.clone()
    leaf.grad = gradient_of(3, 8)
    for call in (optimizer.catch_up, optimizer.state_dict, lambda: clip_and_step(optimizer, 0.0)):
        with pytest.raises(
            RuntimeError, match=r"a table of shape \(60, 8\) was written to while rows of it lacked up to 3"
        ):
            call()


def test_bad_histories():
    weight, mean, square, steps = start(8)
    deferred = ops.DeferredRows(weight[0], mean[0], square[0])
    deferred.count = 1
    deferred.history[0] = torch.tensor([1.0, 1e-2, 1.0, 0.1, 1e-3, 1e-8])
    with pytest.raises(RuntimeError, match="rows are not below 60"):
        ops.adamw_deferred(deferred, rows=torch.tensor([1, 60]))
    deferred.done[7] = 2
    with pytest.raises(RuntimeError, match="a row has had 2 of 1 steps"):
        ops.adamw_deferred(deferred)
    deferred.done = deferred.done[:3]
    with pytest.raises(RuntimeError, match=r"done has shape \[3\]"):
        ops.adamw_deferred(deferred)
    deferred.done = torch.zeros(ROWS, dtype=torch.int32)
    deferred.history = torch.empty(8, 3)
    with pytest.raises(RuntimeError, match=r"the history has shape \[8, 3\], expected .* \(1 or more, 6\)"):
        ops.adamw_deferred(deferred)
    with pytest.raises(ValueError, match=r"deferred\[0\] is of another table than weight 0"):
        ops.adamw(
            [weight[0].clone()],
            [gradient_of(0, 8)],
            mean,
            square,
            steps,
            rates=[0.1],
            decays=[0.0],
            deferred=[deferred],
            backend="cpu",
            **HYPER,
        )
