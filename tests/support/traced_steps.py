"""Traces of training steps on fixed buffers: of sound ones, and of some with a fault each that no graph could repeat.

Run as a program, which has Triton's own launching and not its interpreter. Its last line is JSON: by the name of a case
what `traced` gives.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from dry_launches import as_gpu
from fixed_step import BETAS, EPS, Buffers, Trained
from launch_trace import Launches, Recorder, Trace, differences, without_compiler

from fastbert import packing
from fastbert.backend import use_backend
from fastbert.ops import packing as packing_op
from fastbert.packed_inputs import PackedInputs

WARM = 2  # steps of a bucket before those that are compared: what is made late is made in them


class Bucket(Buffers):
    def __init__(self, tokens: int = 16, sequences: int = 4, longest: int = 5, labelled: int = 9):
        super().__init__(tokens, sequences, labelled, longest)
        self.count = 0

    def fill(self, seed: int) -> int:
        self.count = super().fill(seed)
        return self.count

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"ids": self.ids, "labels": self.labels, "cu_seqlens": self.cu_seqlens, "kept": self.kept}


class Autocast(Trained):
    def backward(self, buffers):
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(buffers.packed(), num_items_in_batch=self.total).loss
        loss.backward()
        return loss.detach()


class CountOfTheHost(Trained):
    def backward(self, buffers):
        loss = self.model(buffers.packed(), num_items_in_batch=float(buffers.count)).loss
        loss.backward()
        return loss.detach()


class RateOfTheHost(Trained):
    """torch's optimizer, whose learning rate is a float."""

    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.parameters, betas=BETAS, eps=EPS, fused=True)

    def fill(self, step, buffers):
        super().fill(step, buffers)
        self.optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)

    def optimize(self):
        self.optimizer.step()
        self.state.gradients.zero_()


class NumbersMadeInTheStep(Trained):
    def fill(self, step, buffers):
        super().fill(step, buffers)
        self.of_python = self.numbers.tolist()

    def optimize(self):
        self.numbers.copy_(torch.tensor(self.of_python))
        super().optimize()


class GradientsDropped(Trained):
    def backward(self, buffers):
        self.model.zero_grad(set_to_none=True)
        return super().backward(buffers)


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


class LoggedOutput(Trained):
    def __init__(self):
        super().__init__()
        self.logged = []

    def log(self, loss):
        self.logged.append(loss)


class LossAskedFor(Trained):
    def log(self, loss):
        super().log(loss)
        self.last = loss.item()


class SizedByLabels(Bucket):
    """As many rows as there are labels, which the host knows."""

    def packed(self):
        inputs = super().packed()
        return PackedInputs({**inputs, "batch": replace(inputs["batch"], labelled=self.rows())})

    def rows(self):
        return self.kept[: self.count]


class LabelsLookedFor(SizedByLabels):
    def rows(self):
        return (self.labels != -100).nonzero().flatten()


class BatchReplaced(Bucket):
    def fill(self, seed):
        self.ids = self.ids.clone()
        return super().fill(seed)


class WeightMoved(Trained):
    def fill(self, step, buffers):
        super().fill(step, buffers)
        if step == WARM + 1:
            self.parameters[0].data = self.parameters[0].data.clone()


# What is trained, and the kinds of batches that come in turn.
CASES: dict[str, tuple[type[Trained], Callable[[], list[list[Bucket]]]]] = {
    "one batch": (Trained, lambda: [[Bucket()]]),
    "bf16": (Autocast, lambda: [[Bucket()]]),
    "accumulation": (Trained, lambda: [[Bucket(), Bucket()]]),
    "two buckets": (Trained, lambda: [[Bucket()], [Bucket(40, 4, 20, 9)]]),
}
FAULTS = (
    CountOfTheHost, RateOfTheHost, NumbersMadeInTheStep, GradientsDropped, DrawsForItself, StateMadeLate, LoggedOutput,
    LossAskedFor, SizedByLabels, LabelsLookedFor, BatchReplaced, WeightMoved,
)  # fmt: skip
for _fault in FAULTS:
    if issubclass(_fault, Bucket):
        CASES[_fault.__name__] = (Trained, lambda bucket=_fault: [[bucket()]])
    else:
        CASES[_fault.__name__] = (_fault, lambda: [[Bucket()]])


def named(trained: Trained, kinds: list[list[Bucket]]) -> dict[str, torch.Tensor]:
    """All that is there before the first step."""
    state = trained.state
    tensors = {f"weight {i}": p.detach() for i, p in enumerate(trained.parameters)}
    tensors |= {"gradients and moments": state.gradients, "addresses": state.addresses, "counts": state.counts}
    tensors |= {"groups": state.groups, "numbers": trained.numbers, "total": trained.total, "at": trained.at}
    tensors |= {"losses": trained.losses}
    for i, kind in enumerate(kinds):
        for j, bucket in enumerate(kind):
            tensors |= {f"{name} of batch {j} of bucket {i}": t for name, t in bucket.tensors().items()}
    return tensors


def contents(trained: Trained, kind: list[Bucket]) -> dict[str, Any]:
    """What a step goes by, for its batches and its optimizer."""
    offsets = [bucket.cu_seqlens.tolist() for bucket in kind]
    return {
        "lengths": offsets,
        "ids": [bucket.ids.tolist() for bucket in kind],
        "labels": [bucket.count for bucket in kind],
        "tokens": [each[-1] for each in offsets],
        "step": trained.at.item(),
        "seeds": trained.seeds._rows.tolist(),
        "rates and corrections": trained.numbers.tolist(),
    }


def traced(launches: Launches, case: str) -> dict[str, Any]:
    """Of a bucket's third and fourth step: how often each launch is there, what is wrong (`differences` between the
    two, `forbidden` and `left` in either, `moved`: weights are not where the table of their addresses says, or it is
    another one), and the contents of the buffers.
    """
    make, make_kinds = CASES[case]
    trained, kinds = make(), make_kinds()
    recorder = Recorder(launches)
    recorder.name(named(trained, kinds))
    table = trained.state.addresses.clone()
    traces: list[list[Trace]] = [[] for _ in kinds]
    gone_by: list[list[Any]] = [[] for _ in kinds]
    for step in range((WARM + 2) * len(kinds)):
        which = step % len(kinds)
        trained.fill(step, kinds[which])
        gone_by[which].append(contents(trained, kinds[which]))
        with recorder.step() as trace:
            trained.run(kinds[which])
        traces[which].append(trace)
    compared = [trace for steps in traces for trace in steps[WARM:]]
    is_same = trained.state.is_of(trained.parameters) and torch.equal(trained.state.addresses, table)
    return {
        "launches": [steps[-1].counts() for steps in traces],
        "differences": [line for steps in traces for line in differences(*steps[WARM:])],
        "forbidden": [line for trace in compared for line in trace.forbidden],
        "left": [line for trace in compared for line in trace.left],
        "moved": not is_same,
        "contents": [each[WARM:] for each in gone_by],
    }


def main() -> None:
    torch.set_num_threads(1)
    launches = without_compiler(as_gpu(90))
    packing._is_on_host = packing_op._is_on_cpu = lambda t: False
    sys.stdout.write(json.dumps({case: traced(launches, case) for case in CASES}) + "\n")


if __name__ == "__main__":
    main()
