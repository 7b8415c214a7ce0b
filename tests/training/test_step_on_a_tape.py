"""A training step, recorded once and replayed, against the step itself: how a CUDA graph goes wrong, without one."""

from __future__ import annotations

import pytest
import torch
from fixed_step import BETAS, Buffers, Trained
from tape import Tape

from fastbert import ops
from fastbert.backend import use_backend
from fastbert.native.availability import triton_error

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))

WARM = 2  # steps before the recording: what is made late is made in them


def bucket(wide: bool = False) -> Buffers:
    return Buffers(16, 4, 5, 9) if wide else Buffers(10, 3, 4, 6)


def run_both(taped: Trained, kinds: list[list[Buffers]], steps: int) -> Trained:
    """So many steps, in turn over the kinds of batches: of an eager run, and on a tape for each kind. The eager one."""
    eager, tapes = Trained(), [Tape() for _ in kinds]
    theirs = [[Buffers(len(b.ids), len(b.cu_seqlens) - 1, len(b.kept), b.longest) for b in kind] for kind in kinds]
    for step in range(steps):
        which = step % len(kinds)
        eager.fill(step, theirs[which])
        eager.run(theirs[which])
        taped.fill(step, kinds[which])
        if tapes[which].calls:
            tapes[which].replay()
        elif step < WARM * len(kinds):
            taped.run(kinds[which])
        else:
            with tapes[which]:
                taped.run(kinds[which])
    return eager


@pytest.mark.parametrize("steps", (8, pytest.param(50, marks=pytest.mark.full)))
@pytest.mark.parametrize("kind", ("one batch", "accumulation", "two buckets"))
def test_replayed_steps_are_the_steps_themselves(kind, steps):
    """Batches, lengths, numbers of labels, rates, seeds and step numbers change in each. Bit for bit."""
    kinds = {
        "one batch": [[bucket()]],
        "accumulation": [[bucket(), bucket()]],
        "two buckets": [[bucket()], [bucket(wide=True)]],
    }[kind]
    taped = Trained()
    eager = run_both(taped, kinds, steps)
    assert all(map(torch.equal, taped.kept(), eager.kept()))
    assert len(set(eager.losses[:steps].tolist())) == steps and eager.losses.isfinite().all()
    assert not taped.state.gradients.any()


class FloatRate(Trained):
    def optimize(self):
        numbers = torch.tensor(self.numbers.tolist())
        ops.adamw_flat(self.state, numbers, beta1=BETAS[0], beta2=BETAS[1], eps=1e-8, max_norm=1.0, backend="triton")


class FloatCount(Trained):
    def backward(self, buffers):
        loss = self.model(buffers.packed(), num_items_in_batch=float(self.total)).loss
        loss.backward()
        return loss.detach()


class LoggedOutput(Trained):
    def __init__(self):
        super().__init__()
        self.logged = []

    def fill(self, step, buffers):
        if self.logged:
            self.logged.append(self.logged[-1])  # as the list of a loop that got the captured step's output has it
        super().fill(step, buffers)

    def log(self, loss):
        self.logged[-1:] = [loss]

    def kept(self):
        return [*super().kept()[:-1], torch.stack([*self.logged, *[self.losses[0]] * 64])[:64]]


class GradientsDropped(Trained):
    def backward(self, buffers):
        self.model.zero_grad(set_to_none=True)
        return super().backward(buffers)


class NothingZeroed(Trained):
    def optimize(self):
        gradients = self.state.gradients.clone()
        super().optimize()
        self.state.gradients.copy_(gradients)


class DrawsForItself(Trained):
    def run(self, buffers):
        with use_backend("triton"):
            losses = [self.backward(each) for each in buffers]
        self.optimize()
        self.log(torch.stack(losses).sum())


class StateMadeLate(Trained):
    steps = 0

    def optimize(self):
        self.steps += 1
        if self.steps == WARM + 1:
            self.state.means, self.state.squares = self.state.means.clone(), self.state.squares.clone()
        super().optimize()


FAULTS = (FloatRate, FloatCount, LoggedOutput, GradientsDropped, NothingZeroed, DrawsForItself, StateMadeLate)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_graph_would_repeat_wrongly_is_seen(fault):
    taped = fault()
    eager = run_both(taped, [[bucket()]], 5)
    assert not all(map(torch.equal, taped.kept(), eager.kept()))
