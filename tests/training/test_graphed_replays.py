"""A captured training step, replayed, against the step itself: how a CUDA graph goes wrong, without one."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace

import graphed_faults as faults
import pytest
import torch
from graphed_steps import WORDS, batch, kept, make_step, run_step
from host_syncs import HostSyncs
from tape import TapeGraphs
from training_runs import ALONE, OPTIONS, PHASE, make_loop, make_model

from benchmarks.gpu.simulated.no_graphs import NoGraphs
from fastbert.backend import use_backend
from fastbert.native.availability import triton_error
from fastbert.training.graphed import GraphedStep
from fastbert.training.pretraining import MaskedLM
from fastbert.training.train_step import TrainStep

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
KINDS = ("one batch", "accumulation", "two buckets")


def batches_of(kind: str, number: int) -> list:
    if kind == "accumulation":
        return [batch(2 * number), batch(2 * number + 1)]
    if kind == "two buckets":
        return [batch(number, is_wide=number % 2 == 1)]
    return [batch(number, largest=WORDS - 1 if number else WORDS - 2)]  # the second has ids that the first had not


def run(step: GraphedStep, kind: str, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """So many steps: their losses, and what they leave."""
    with use_backend("triton"):
        for number in range(steps):
            run_step(step, number, batches_of(kind, number))
    return step.losses(), kept(step)


CASES = (
    ("one batch", 3),
    *(pytest.param(kind, 5, marks=pytest.mark.simulated) for kind in KINDS),
    *(pytest.param(kind, 50, marks=pytest.mark.full) for kind in KINDS),
)


@pytest.mark.simulated
@pytest.mark.parametrize(("kind", "steps"), CASES)
def test_replayed_steps_are_the_steps_themselves(kind, steps):
    """Batches, lengths, numbers of labels, rates, seeds and step numbers change in each. Bit for bit."""
    graphs = TapeGraphs()
    replayed = make_step(graphs)
    losses, left = run(replayed, kind, steps)
    expected, theirs = run(make_step(NoGraphs()), kind, steps)
    assert losses == expected and len(set(losses)) == steps and all(map(math.isfinite, losses))
    assert all(map(torch.equal, left, theirs))
    assert replayed.why_eager is None
    expected_replays = {  # of buckets; the optimizer's come second
        "one batch": [steps - 2, steps - 1],
        "accumulation": [2 * steps - 1, steps - 1],
        "two buckets": [(steps + 1) // 2 - 1, steps - 1, steps // 2 - 1],
    }
    assert [tape.replays for tape in graphs.tapes] == expected_replays[kind]
    assert all(p.grad is None for p in replayed.model.parameters())


FAULTS = (
    faults.RateOfTheHost,
    faults.CountOfTheHost,
    faults.LoggedOutput,
    faults.GradientsDropped,
    faults.NothingZeroed,
    faults.DrawsForItself,
    faults.StateMadeLate,
    faults.SameSeeds,
)
OTHERS = (faults.NumbersMadeInTheStep, faults.BatchReplaced, faults.WeightMoved)  # launch traces see them in no time


@pytest.fixture(scope="module")
def five_steps():
    return run(make_step(NoGraphs()), "one batch", 5)


@pytest.mark.simulated
@pytest.mark.parametrize("fault", (*FAULTS, *(pytest.param(fault, marks=pytest.mark.full) for fault in OTHERS)))
def test_what_a_graph_would_repeat_wrongly_is_seen(fault, five_steps):
    losses, left = run(make_step(TapeGraphs(), fault), "one batch", 5)
    assert losses != five_steps[0] or not all(map(torch.equal, left, five_steps[1]))


@pytest.mark.simulated
def test_no_step_of_a_loop_waits(tmp_path, monkeypatch):
    """The device is never asked anything: not for a value, and not to be done."""
    # Labels are counted in a batch on the host, where a look is no wait.
    monkeypatch.setattr(MaskedLM, "counts", staticmethod(lambda batch: [batch["batch"].labelled.numel()]))
    options = replace(OPTIONS, phases=(replace(PHASE, step_tokens=16, max_length=16),), workers=2)
    loop = make_loop(tmp_path, options, model=make_model(num_hidden_layers=1))
    step = TrainStep(loop.task, loop.model, loop.optimizer, ALONE, max_norm=1.0, bf16=False, graphs=TapeGraphs())
    step._graphed.buckets.most = 1  # the largest: each takes a second to record
    loop._step = step
    loop.model.train()
    with use_backend("triton"), closing(loop._epoch(options.phases[0])) as epoch:
        for number in range(4):
            with HostSyncs() as syncs:
                loop.train_step(next(epoch))
            assert number == 0 or syncs.found == [], number
    assert not step.objections
