"""One step of a run's optimizer."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from fastbert import ops
from fastbert.data.batches import StepSampler
from fastbert.data.loader import make_loader, read
from fastbert.packed_inputs import PackedInputs
from fastbert.training.distributed import ProcessGroup
from fastbert.training.optimizers import catch_up, clip_and_step
from fastbert.training.task import Task


class TrainStep:
    """Forward and backward of a step's batches, clipping and the optimizer."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Any,
        process_group: ProcessGroup,
        *,
        max_norm: float,
        bf16: bool,
    ):
        self.task, self.model, self.optimizer, self.process_group = task, model, optimizer, process_group
        self.max_norm, self.bf16 = max_norm, bf16
        self._seeds = ops.StepSeeds(process_group.device)

    def batches(self, collate: Any, examples: Any, sampler: StepSampler, workers: int) -> Generator[list[PackedInputs]]:
        """The batches of each step of an epoch, on the host."""
        pins = self.process_group.device.type == "cuda"
        loader = make_loader(examples, sampler, collate, workers=workers, pin_memory=pins)
        with closing(read(loader)) as batches:
            for _ in range(len(sampler) // sampler.parts):
                yield [next(batches) for _ in range(sampler.parts)]

    def __call__(self, batches: Sequence[PackedInputs], totals: Sequence[float], seed: int) -> torch.Tensor:
        """One step; returns its loss (), on the device. totals: what each of the loss's terms is divided by. seed: of
        dropout.
        """
        device = self.process_group.device
        with ops.only_recorded_writes():
            self._seeds.begin(seed)
            here = [batch.to(device, non_blocking=True) for batch in batches] if device.type != "cpu" else list(batches)
            autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)
            catch_up(self.optimizer, [batch["input_ids"] for batch in here])
            with ops.seeds_from(self._seeds):
                loss = self.task.backward(self.model, here, list(totals), autocast)
                clip_and_step(self.optimizer, self.max_norm)
            self.optimizer.zero_grad()
        return loss.detach()
