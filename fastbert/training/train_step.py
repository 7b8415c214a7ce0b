"""One step of a run's optimizer: as CUDA graphs where nothing objects, else op by op."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from fastbert import ops
from fastbert.cuda_graphs.capture import CudaGraphs, Graphs
from fastbert.data.batches import StepSampler
from fastbert.data.loader import make_loader, read
from fastbert.packed_inputs import PackedInputs
from fastbert.training.distributed import ProcessGroup
from fastbert.training.graphed.losses import LossRing
from fastbert.training.graphed.plan import plan_buckets
from fastbert.training.graphed.step import GraphedStep
from fastbert.training.optimizers import catch_up, clip_and_step
from fastbert.training.task import Phase, Task


class TrainStep:
    """Forward and backward of a step's batches, clipping and the optimizer.

    graphs: what captures steps; None: CUDA graphs, on a GPU. `losses`: of steps, those not read yet. `objections`:
    why steps ran op by op where they might have been captured; their reader clears them.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Any,
        process_group: ProcessGroup,
        *,
        max_norm: float,
        bf16: bool,
        parts: int = 1,
        graphs: Graphs | None = None,
    ):
        self.task, self.model, self.optimizer, self.process_group = task, model, optimizer, process_group
        self.max_norm, self.bf16 = max_norm, bf16
        self.losses, self._seeds = LossRing(process_group.device), ops.StepSeeds(process_group.device)
        self.objections, self._objection = set[str](), None
        self._graphed: GraphedStep | None = None
        self._checks_guard = True
        if graphs is None and process_group.device.type != "cuda":
            return
        self._objection = "other processes add up gradients" if process_group.size > 1 else task.uncapturable(parts)
        if self._objection is None:
            self._graphed = GraphedStep(
                model,
                optimizer,
                self._loss,
                max_norm=max_norm,
                bf16=bf16,
                graphs=graphs or CudaGraphs(process_group.device),
            )
            self.losses = self._graphed.losses_kept
        elif process_group.is_main:
            warnings.warn(f"the training steps run op by op: {self._objection}", stacklevel=3)

    def recheck_guard(self) -> None:
        """Somebody beside the steps has had the model: it was evaluated, saved, or loaded."""
        self._checks_guard = True

    def prepare(self, collate: Any, examples: Any, sampler: StepSampler, phase: Phase) -> str:
        """Capture what an epoch's batches need, and say how many graphs there are; "" where nothing is captured."""
        if self._graphed is None:
            return ""
        buckets, texts = self._graphed.buckets, self.task.texts
        example = plan_buckets(buckets, collate, examples, sampler, phase.max_length, texts)
        return self._graphed.prepare([example], len(self.task.counts(example)))

    def batches(self, collate: Any, examples: Any, sampler: StepSampler, workers: int) -> Generator[list[PackedInputs]]:
        """The batches of each step of an epoch, on the host. Those of captured steps are copied into pinned blocks of
        their buckets' sizes, the others are pinned as they come.
        """
        pins = self.process_group.device.type == "cuda" and self._graphed is None
        loader = make_loader(examples, sampler, collate, workers=workers, pin_memory=pins)
        with closing(read(loader)) as batches:
            for _ in range(len(sampler) // sampler.parts):
                yield [next(batches) for _ in range(sampler.parts)]

    def __call__(self, batches: Sequence[PackedInputs], totals: Sequence[float], seed: int) -> None:
        """One step. totals: what each of the loss's terms is divided by. seed: of dropout."""
        with ops.only_recorded_writes():
            if self._graphed is not None:
                self._graphed(batches, totals, seed=seed, looks=self._checks_guard)
                self._checks_guard = False
            else:
                self._run(list(batches), totals, seed)
        objection = self._objection if self._graphed is None else self._graphed.why_eager
        if objection is not None:
            self.objections.add(objection)

    def _run(self, batches: list[PackedInputs], totals: Sequence[float], seed: int) -> None:
        device = self.process_group.device
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
