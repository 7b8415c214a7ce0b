"""One step of a run's optimizer: as CUDA graphs where nothing objects, else op by op."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from fastbert import ops
from fastbert.data.batches import StepSampler
from fastbert.data.loader import make_loader, read
from fastbert.packed_inputs import PackedInputs
from fastbert.training.distributed import World
from fastbert.training.graphed.ahead import Ahead
from fastbert.training.graphed.buckets import Staged
from fastbert.training.graphed.capture import CudaGraphs, Graphs
from fastbert.training.graphed.lanes import lane_to
from fastbert.training.graphed.losses import LossRing
from fastbert.training.graphed.plan import plan_buckets
from fastbert.training.graphed.step import GraphedStep
from fastbert.training.optimizers import catch_up, clip_and_step
from fastbert.training.task import Phase, Task


class TrainStep:
    """Forward and backward of a step's batches, clipping and the optimizer.

    graphs: what captures steps; None: CUDA graphs, on a GPU. `losses`: of the steps that nobody has read. `objections`:
    why steps ran op by op where they might have been captured; whoever has read them clears them. `lane`: on which
    batches of captured steps come.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Any,
        world: World,
        *,
        max_norm: float,
        bf16: bool,
        parts: int = 1,
        graphs: Graphs | None = None,
    ):
        self.task, self.model, self.optimizer, self.world = task, model, optimizer, world
        self.max_norm, self.bf16 = max_norm, bf16
        self.losses, self._seeds = LossRing(world.device), ops.StepSeeds(world.device)
        self.objections, self._objection = set[str](), None
        self._graphed: GraphedStep | None = None
        self._example: PackedInputs | None = None
        self._looks = True
        self.lane = lane_to(world.device)
        if graphs is None and world.device.type != "cuda":
            return
        self._objection = "other processes add up gradients" if world.size > 1 else task.uncapturable(parts)
        if self._objection is None:
            self._graphed = GraphedStep(
                model, optimizer, self._loss, max_norm=max_norm, bf16=bf16, graphs=graphs or CudaGraphs()
            )
            self.losses = self._graphed.losses_kept
        elif world.is_main:
            warnings.warn(f"the training steps run op by op: {self._objection}", stacklevel=3)

    def look_again(self) -> None:
        """Somebody beside the steps has had the model: it was evaluated, saved, or loaded."""
        self._looks = True

    def counts(self, batch: PackedInputs | Staged) -> list[int]:
        return batch.counts if isinstance(batch, Staged) else self.task.counts(batch)

    def prepare(self, collate: Any, examples: Any, sampler: StepSampler, phase: Phase) -> str:
        """Capture what an epoch's batches need, and say how many graphs there are; "" where nothing is captured."""
        if self._graphed is None:
            return ""
        buckets, texts = self._graphed.buckets, self.task.texts
        self._example = plan_buckets(buckets, collate, examples, sampler, phase.max_length, texts)
        return self._graphed.prepare([self._example], len(self.task.counts(self._example)))

    def batches(
        self, collate: Any, examples: Any, sampler: StepSampler, workers: int
    ) -> Generator[list[PackedInputs | Staged]]:
        """The batches of each step of the epoch that was prepared last."""
        steps, parts, device = len(sampler) // sampler.parts, sampler.parts, self.world.device
        if self._graphed is None:
            pins = device.type == "cuda"
            with closing(read(make_loader(examples, sampler, collate, workers=workers, pin_memory=pins))) as batches:
                for _ in range(steps):
                    yield [next(batches) for _ in range(parts)]
            return
        assert self._example is not None
        ahead = Ahead(
            self._graphed.buckets, self.task.counts, self._example, self.lane, device, parts=parts, workers=workers
        )
        loader = make_loader(examples, sampler, collate, workers=workers, finish=ahead.finish, take=ahead.blocks.take)
        with closing(ahead), closing(read(loader)) as made:
            yield from ahead.steps(made, steps)

    def __call__(self, batches: Sequence[PackedInputs | Staged], totals: Sequence[float], seed: int) -> None:
        """One step. totals: what each of the loss's terms is divided by. seed: of dropout."""
        with ops.only_recorded_writes():
            if self._graphed is not None:
                self._graphed(batches, totals, seed=seed, looks=self._looks)
                self._looks = False
            else:
                self._run([batch for batch in batches if isinstance(batch, PackedInputs)], totals, seed)
        objection = self._objection if self._graphed is None else self._graphed.why_eager
        if objection is not None:
            self.objections.add(objection)

    def _run(self, batches: list[PackedInputs], totals: Sequence[float], seed: int) -> None:
        device = self.world.device
        self._seeds.begin(seed)
        if device.type != "cpu":
            batches = [batch.to(device, non_blocking=True) for batch in batches]
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)
        catch_up(self.optimizer, [batch["input_ids"] for batch in batches])
        with ops.seeds_from(self._seeds):
            self.losses.add(self.task.backward(self.model, batches, list(totals), autocast))
            clip_and_step(self.optimizer, self.max_norm)
        self.optimizer.zero_grad()
        self.losses.end_step()
        self.losses.count_step()

    def _loss(self, model: nn.Module, batch: PackedInputs, *totals: torch.Tensor) -> torch.Tensor:
        return self.task.loss(model, batch, list(totals))
