"""A captured training step, replayed, against the step itself: how a CUDA graph goes wrong, without one."""

from __future__ import annotations

import math

import pytest
import torch
from graphed_steps import batch, kept, make_step, run_step
from tape import TapeGraphs

from fastbert.backend import use_backend
from fastbert.native.availability import triton_error
from fastbert.testing.graphs import NoGraphs
from fastbert.training.graphed import GraphedStep

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))


def batches_of(kind: str, number: int) -> list:
    if kind == "accumulation":
        return [batch(2 * number), batch(2 * number + 1)]
    return [batch(number, is_wide=kind == "two buckets" and number % 2 == 1)]


def run(step: GraphedStep, kind: str, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """So many steps: their losses, and what they leave."""
    with use_backend("triton"):
        for number in range(steps):
            run_step(step, number, batches_of(kind, number))
    return step.losses(), kept(step)


@pytest.mark.parametrize("steps", (5, pytest.param(50, marks=pytest.mark.full)))
@pytest.mark.parametrize("kind", ("one batch", "accumulation", "two buckets"))
def test_replayed_steps_are_the_steps_themselves(kind, steps):
    """Batches, lengths, numbers of labels, rates, seeds and step numbers change in each. Bit for bit."""
    graphs = TapeGraphs()
    replayed = make_step(graphs)
    losses, left = run(replayed, kind, steps)
    expected, theirs = run(make_step(NoGraphs()), kind, steps)
    assert losses == expected and len(set(losses)) == steps and all(map(math.isfinite, losses))
    assert all(map(torch.equal, left, theirs))
    assert replayed.why_eager is None and len(graphs.tapes) == (
        3 if kind == "two buckets" else 2
    )  # the optimizer's, too
    assert all(p.grad is None for p in replayed.model.parameters())


class FloatRate(GraphedStep):
    """The optimizer's numbers are Python's when they are captured."""

    def _run_optimizer(self, flat):
        if self._optimize is None:
            flat.numbers = torch.tensor(flat.numbers.tolist())
        super()._run_optimizer(flat)


class FloatCount(GraphedStep):
    def _accumulate(self, inputs):
        loss, total = self.loss, float(self._flat.totals)
        self.loss = lambda model, batch, _: loss(model, batch, total)
        super()._accumulate(inputs)
        self.loss = loss


class LoggedOutput(GraphedStep):
    """What is logged is the tensor that a step has made, which the next replay writes."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.logged = []

    def _accumulate(self, inputs):
        super()._accumulate(inputs)
        self.made = self.losses_kept.sum * 1.0

    def __call__(self, *arguments, **options):
        super().__call__(*arguments, **options)
        self.logged.append(self.made)

    def losses(self):
        return torch.stack(self.logged).tolist()


class GradientsDropped(GraphedStep):
    """Gradients of the step before are dropped, and new ones made, which the optimizer does not know."""

    def _accumulate(self, inputs):
        self._flat.gradients = [torch.zeros_like(gradient) for gradient in self._flat.gradients]
        super()._accumulate(inputs)


class NothingZeroed(GraphedStep):
    def _run_optimizer(self, flat):
        gradients = flat.state.gradients.clone()
        super()._run_optimizer(flat)
        flat.state.gradients.copy_(gradients)


class DrawsForItself(GraphedStep):
    def _accumulate(self, inputs):
        taken, self._seeds.device = self._seeds.device, torch.device("meta")
        super()._accumulate(inputs)
        self._seeds.device = taken


class StateMadeLate(GraphedStep):
    def _capture_optimizer(self, flat):
        step = flat.step

        def late():
            flat.state.means = torch.zeros_like(flat.state.gradients)
            step()

        flat.step = late
        return super()._capture_optimizer(flat)


class SameSeeds(GraphedStep):
    """Seeds that are drawn once a run, and not once a step."""

    def _run_part(self, batch, seed):
        super()._run_part(batch, 0)


FAULTS = (
    FloatRate,
    FloatCount,
    LoggedOutput,
    GradientsDropped,
    NothingZeroed,
    DrawsForItself,
    StateMadeLate,
    SameSeeds,
)


@pytest.fixture(scope="module")
def five_steps():
    return run(make_step(NoGraphs()), "one batch", 5)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_graph_would_repeat_wrongly_is_seen(fault, five_steps):
    losses, left = run(make_step(TapeGraphs(), fault), "one batch", 5)
    assert losses != five_steps[0] or not all(map(torch.equal, left, five_steps[1]))
