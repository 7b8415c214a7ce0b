"""One step of a run's optimizer: as CUDA graphs where nothing objects, else op by op."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fastbert import ops
from fastbert.data.batches import StepSampler
from fastbert.packed_inputs import PackedInputs
from fastbert.training.distributed import World
from fastbert.training.graphed.buckets import Staged
from fastbert.training.graphed.capture import CudaGraphs, Graphs
from fastbert.training.graphed.losses import LossRing
from fastbert.training.graphed.plan import Stager, plan_buckets
from fastbert.training.graphed.step import GraphedStep
from fastbert.training.optimizers import catch_up, clip_and_step
from fastbert.training.task import Phase, Task


class TrainStep:
    """Forward and backward of a step's batches, clipping and the optimizer.

    graphs: what captures steps; None: CUDA graphs, on a GPU. `losses`: of the steps that nobody has read. `objections`:
    why steps ran op by op where they might have been captured; whoever has read them clears them.
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

    def counts(self, batch: PackedInputs | Staged) -> list[int]:
        return batch.counts if isinstance(batch, Staged) else self.task.counts(batch)

    def prepare(
        self, collate: Any, examples: Any, sampler: StepSampler, phase: Phase
    ) -> tuple[Callable[[PackedInputs], Any] | None, str]:
        """Capture what an epoch's batches need: what is done to these batches, and how many graphs there are."""
        if self._graphed is None:
            return None, ""
        example = plan_buckets(self._graphed.buckets, collate, examples, sampler, phase.max_length, self.task.texts)
        said = self._graphed.prepare([example], len(self.task.counts(example)))
        return Stager(self.task.counts, self._graphed.buckets), said

    def __call__(self, batches: Sequence[PackedInputs | Staged], totals: Sequence[float], seed: int) -> None:
        """One step. totals: what each of the loss's terms is divided by. seed: of dropout."""
        with ops.only_recorded_writes():
            if self._graphed is not None:
                self._graphed(batches, totals, seed=seed)
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
