"""Traces of captured training steps: of sound ones, and of some with a fault each that no graph could repeat.

Run as a program, which has Triton's own launching and not its interpreter. Its last line is JSON: by the name of a case
what `traced` gives.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import graphed_faults as faults
import torch
from dry_launches import as_gpu
from graphed_steps import batch, make_step, run_step
from launch_trace import Launches, Recorder, Trace, differences, without_compiler

from benchmarks.gpu.simulated.no_graphs import NoGraphs
from fastbert import packing
from fastbert.backend import use_backend
from fastbert.ops import packing as packing_op
from fastbert.packed_inputs import PackedInputs
from fastbert.training.graphed import GraphedStep

STEPS = 3  # of a bucket: in the first its graph is captured


class TracedGraphs(NoGraphs):
    """Runs what would be captured, and traces it each time: `traces`, by capture. `step`: whose graphs they are."""

    step: GraphedStep

    def __init__(self, launches: Launches):
        super().__init__()
        self.traces: list[list[Trace]] = []
        self._launches = launches
        self._captured, self._host = Recorder(launches), Recorder(launches)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        traces: list[Trace] = []

        def traced() -> None:
            with self._host.paused(), self._captured.step() as trace:
                run()
            traces.append(trace)

        self._captured.name(named(self.step))
        self.traces.append(traces)
        traced()
        return traced

    def host(self) -> AbstractContextManager[Trace]:
        """Traces what a step does beside what was captured."""
        self._host = Recorder(self._launches)  # with a name for all that is there now
        self._host.name(named(self.step))
        return self._host.step()


def named(step: GraphedStep) -> dict[str, torch.Tensor]:
    """What is there before a step, and stays."""
    flat, losses = step._flat, step.losses_kept
    tensors = {f"weight {i}": p.detach() for i, p in enumerate(step.model.parameters())}
    tensors |= {"sum of losses": losses.sum, "losses": losses._losses, "place of a loss": losses._at}
    tensors |= {"seeds": step._seeds.rows}
    if flat is not None:
        state = flat.state
        tensors |= {
            "gradients": state.gradients,
            "moments": state.means,
            "addresses": state.addresses,
            "counts": state.counts,
        }
        tensors |= {"groups": state.groups, "numbers": flat.numbers, "steps": flat.steps}
    return tensors | {f"batch of bucket {i}": each.block for i, each in enumerate(step._captured.values())}


def one_batch(number: int) -> list[PackedInputs]:
    return [batch(number)]


def two_batches(number: int) -> list[PackedInputs]:
    return [batch(2 * number), batch(2 * number + 1)]


def of_two_buckets(number: int) -> list[PackedInputs]:
    return [batch(number, is_wide=number % 2 == 1)]


# What is trained, in bf16 or not, and a step's batches.
CASES: dict[str, tuple[type[GraphedStep], bool, Callable[[int], list[PackedInputs]]]] = {
    "one batch": (GraphedStep, False, one_batch),
    "bf16": (GraphedStep, True, one_batch),
    "accumulation": (GraphedStep, True, two_batches),
    "two buckets": (GraphedStep, True, of_two_buckets),
}
FAULTS = (
    faults.CountOfTheHost,
    faults.RateOfTheHost,
    faults.NumbersMadeInTheStep,
    faults.GradientsDropped,
    faults.DrawsForItself,
    faults.StateMadeLate,
    faults.LoggedOutput,
    faults.LossAskedFor,
    faults.SizedByLabels,
    faults.LabelsLookedFor,
    faults.BatchReplaced,
    faults.WeightMoved,
    faults.LossesReadInEachStep,
    faults.LossesKeptInEachStep,
)
CASES |= {fault.__name__: (fault, False, one_batch) for fault in FAULTS}


def contents(step: GraphedStep, batches: list[PackedInputs]) -> dict[str, Any]:
    """What a step went by, for its batches and its optimizer."""
    flat = step._flat
    return {
        "lengths": [each["batch"].cu_seqlens.tolist() for each in batches],
        "ids": [each["input_ids"].tolist() for each in batches],
        "labels": [each["batch"].labelled.numel() for each in batches],
        "tokens": [each["batch"].total_tokens for each in batches],
        "total": flat.totals.tolist(),
        "step": flat.step_number,
        "seeds": step._seeds.rows.tolist(),
        "rates and corrections": flat.numbers.tolist(),
    }


def written(trace: Trace) -> list[str]:
    """Which operators have written into what was there before the step, in their order."""
    found = (re.fullmatch(r"([\w.]+)\(.* -> \[([a-z][\w ]*)\+\d+ .*", line) for line in trace.launches)
    return [f"{match[1]} {match[2]}" for match in found if match]


def traced(launches: Launches, case: str) -> dict[str, Any]:
    """Of all that was captured: how often each launch is there, what is wrong (`differences` of replays from what was
    captured, `forbidden` and `left` in one of them, `moved`: weights are not where the table of their addresses says,
    or it is another one), and how often it was run. Of the host's steps behind captures: what is wrong there (`host
    waits`, `host left`), and what the last one has written. By bucket the contents of the buffers.
    """
    kind, bf16, batches_of = CASES[case]
    graphs = TracedGraphs(launches)
    graphs.step = step = make_step(graphs, kind, bf16=bf16)
    num_buckets = 2 if batches_of is of_two_buckets else 1
    hosts: list[Trace] = []
    gone_by: list[list[Any]] = [[] for _ in range(num_buckets)]
    tables: list[torch.Tensor] = []
    for number in range(STEPS * num_buckets):
        batches = batches_of(number)
        with graphs.host() as host:
            run_step(step, number, batches)
        hosts.append(host)
        gone_by[number % num_buckets].append(contents(step, batches))
        tables.append(step._flat.state.addresses.clone())
    is_same = step._flat.state.is_of(step._flat.weights) and all(torch.equal(tables[0], each) for each in tables)
    runs = [trace for traces in graphs.traces for trace in traces]
    return {
        "launches": [traces[0].counts() for traces in graphs.traces],
        "runs": [len(traces) for traces in graphs.traces],
        "differences": [
            line for first, *others in graphs.traces for each in others for line in differences(first, each)
        ],
        "forbidden": [line for trace in runs for line in trace.forbidden],
        "left": [line for trace in runs for line in trace.left],
        "moved": not is_same,
        "host waits": [line for trace in hosts[num_buckets:] for line in trace.waits],
        "host left": [line for trace in hosts[num_buckets:] for line in trace.left],
        "host writes": written(hosts[-1]),
        "contents": gone_by,
    }


def main() -> None:
    torch.set_num_threads(1)
    launches = without_compiler(as_gpu(90))
    packing._is_on_host = packing_op._is_on_cpu = lambda t: False
    with use_backend("triton"):
        sys.stdout.write(json.dumps({case: traced(launches, case) for case in CASES}) + "\n")


if __name__ == "__main__":
    main()
