"""A contestant of `make gpu`'s part `steps`, in a process of its own: training steps of BERT with masked words.

Batches lie in the host's pinned memory, as a loader leaves them; two of the same lengths come in turn.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

import fastbert
from benchmarks.gpu import profile
from benchmarks.gpu.models import COMPILED
from benchmarks.gpu.steps.batches import Texts, lengths_of
from benchmarks.gpu.steps.ways import MAX_NORM, graphs_on, layers_seen, op_by_op, plain_step
from benchmarks.gpu.subject import Subject, contest
from fastbert.bench.worker import serve
from fastbert.training.graphed import GraphedStep

OP_BY_OP, ONE_OP, GRAPHS = "fastbert, op by op", "fastbert, one op", "fastbert, graphs"
PROFILE = "profile "  # what is asked for is that of the batch behind it
LAYERS_OP = "encoder_layers_training"
HOST_CALLS = 3


class StepSubject(Subject):
    """`task["batches"]` are of steps/batches.py. A GPU's memory is the next one's behind each turn."""

    head = "MaskedLM"

    def __init__(self, task: dict[str, Any]):
        super().__init__(task)
        self.is_ours = task["contestant"].startswith("fastbert")
        self.way = op_by_op if task["contestant"] == OP_BY_OP else nullcontext
        self.graphed: GraphedStep | None = None
        self.checked: dict[str, None] = {}
        if task["contestant"] == COMPILED:
            from torch._dynamo import config

            config.recompile_limit = 4 * len(task["batches"])  # each batch has a shape of its own

    def lengths(self, batch: str) -> list[int]:
        return lengths_of(batch, self.task["smoke"])

    def texts(self, batch: str, seed: int = 1) -> Texts:
        return Texts.draw(self.lengths(batch), self.model.config.vocab_size, seed)

    def inputs(self, batch: str) -> dict[str, torch.Tensor]:
        """For the check."""
        padded = self.texts(batch).padded()
        return {name: t.to(self.device) for name, t in padded.items() if name != "labels"}

    def check(self, batch: str) -> None:
        """Of one size of each kind: they have the same first sequences in another order."""
        kind = batch.split()[1]
        if kind not in self.checked:
            with self.way():
                super().check(batch)
            self.checked[kind] = None

    # ----------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        super().begin()
        if self.task["contestant"] == GRAPHS and self.graphed is None:
            graphs = graphs_on(self.device)
            self.graphed = GraphedStep(self.model, self.optimizer, loss_of, max_norm=MAX_NORM, graphs=graphs)

    def step_of(self, batch: str) -> Callable[[], object]:
        given = itertools.cycle([self.on_the_host(self.texts(batch, seed)) for seed in (1, 2)])
        step = self.plain if self.graphed is None else self.graphed
        return lambda: step(next(given))

    def on_the_host(self, texts: Texts) -> Any:
        if self.graphed is not None:
            return texts.packed()  # which it puts into pinned memory itself
        pins = self.device.type == "cuda"
        if self.is_ours:
            packed = texts.packed()
            return packed.pin_memory() if pins else packed
        return {name: t.pin_memory() if pins else t for name, t in texts.padded().items()}

    def plain(self, batch: Any) -> object:
        assert self.optimizer is not None
        with self.way():
            return plain_step(self.loss, self.optimizer, [batch])

    def loss(self, batch: Any) -> torch.Tensor:
        if self.is_ours:
            inputs = batch.to(self.device, non_blocking=True)
        else:
            inputs = {name: t.to(self.device, non_blocking=True) for name, t in batch.items()}
        with self.autocast():
            return loss_of(self.run, inputs)

    def prepare(self, batch: str) -> dict[str, Any]:
        """Also how many layers one op had at most: 0, where none stands for a layer. Of graphs the peak is that of the
        step that is captured: later ones use the same memory.
        """
        self.begin()
        if not self.is_ours:
            return super().prepare(batch)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with layers_seen() as layers:
            self.step_of(batch)()
        captured = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None
        found = super().prepare(batch)
        if self.graphed is not None:
            assert self.device.type != "cuda" or self.graphed.why_eager is None, self.graphed.why_eager
            found["peak_memory"] = captured
        found["layers_in_one_op"] = max(layers, default=0)
        with self.way():
            found["layers_op"] = fastbert.backends(self.device, torch.bfloat16)[LAYERS_OP]
        return found

    # ----------------------------------------------------------------------------------------------------------------

    def turn(self, asked: str) -> dict[str, Any]:
        """Seconds of a step, and until its call returned on a host that nothing kept waiting; or its profile."""
        batch = asked.removeprefix(PROFILE)
        if batch != asked:
            found: dict[str, Any] = profile.profile_call(self.calls[batch], self.device, self.task["smoke"])[0]
        else:
            found = super().turn(batch)
            found["host_seconds"] = self.host_seconds(self.calls[batch])
        self.empty()
        return found

    def host_seconds(self, call: Callable[[], object]) -> float:
        seconds = []
        for _ in range(1 if self.task["smoke"] else HOST_CALLS):
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


if __name__ == "__main__":
    serve(partial(contest, kind=StepSubject))
