"""The steps of a run: forward, backward, clip, optimizer; what is logged, saved and evaluated between them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from fastbert.data.batches import Steps, StepSampler, make_loader
from fastbert.packed_inputs import PackedInputs
from fastbert.training.checkpoints import Checkpoints
from fastbert.training.distributed import World, gradients_stay_local
from fastbert.training.schedules import Schedule


class TrainingError(RuntimeError):
    """A run cannot go on. The message says why, and which checkpoint is the last good one."""


class Task(Protocol):
    """What is trained: a model's examples, how they become batches, and the loss."""

    collate: Callable[[list[Any]], PackedInputs]

    def examples(self, epoch: int) -> tuple[Any, Any]:
        """(the examples of an epoch, the number of tokens of each)."""

    def counts(self, batch: PackedInputs) -> list[int]:
        """What each of the loss's terms is the mean over, in this batch: a number of labels for each term."""

    def loss(self, model: nn.Module, batch: PackedInputs, totals: list[float]) -> torch.Tensor:
        """The sum over this batch of each term, divided by that term's total, and added up."""


@dataclass(frozen=True)
class LoopOptions:
    """A run's length and habits.

    steps: of the optimizer. step_tokens: of one step, over all ranks. parts: batches a rank makes of its share of a
    step. max_norm: gradients longer than that are shortened (Pascanu et al. 2013); 0: not. bf16: products under
    autocast; the weights stay float32. save_every, log_every: steps. keep: checkpoints. workers: of the DataLoader.
    """

    steps: int
    step_tokens: int
    max_examples: int | None = None
    parts: int = 1
    max_norm: float = 1.0
    bf16: bool = False
    seed: int = 0
    save_every: int = 1000
    log_every: int = 10
    keep: int = 2
    workers: int = 0


class Loop:
    """Runs a task on one rank. All ranks make one alike, and call the same methods.

    `model` is what `wrap` gave. The random numbers of a step (dropout) follow from the
    seed, the step and the rank, so a run that was stopped goes on with the same bits.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        hidden_size: int,
        optimizer: Any,
        schedule: Schedule,
        world: World,
        folder: Path,
        options: LoopOptions,
        on_log: Callable[[dict[str, Any]], None] = lambda row: None,
    ):
        self.task, self.model, self.hidden_size = task, model, hidden_size
        self.optimizer, self.schedule, self.world, self.options, self.on_log = (
            optimizer,
            schedule,
            world,
            options,
            on_log,
        )
        self.folder = folder
        self.checkpoints = Checkpoints(folder / "checkpoints", world, options.keep)
        self.step, self.epoch, self.epoch_step = 0, 0, 0
        self._losses: list[torch.Tensor] = []
        self._tokens, self._since = 0, time.perf_counter()

    def resume(self) -> bool:
        """Go on with the last checkpoint; False if there is none. Raises CheckpointError."""
        path = self.checkpoints.last()
        if path is not None:
            extra = self.checkpoints.load(path, self.model, self.optimizer)
            self.step, self.epoch, self.epoch_step = extra["step"], extra["epoch"], extra["epoch_step"]
        if self.world.is_main:
            _cut_log(self.folder / "log.jsonl", self.step)
        return path is not None

    def run(self) -> None:
        """Train up to `options.steps`. Raises TrainingError: the loss is no number any more."""
        self.model.train()
        self._since = time.perf_counter()
        try:
            while self.step < self.options.steps:
                for batches in self._epoch():
                    self.train_step(batches)
                    self._after_step()
                    if self.step == self.options.steps:
                        break
                else:
                    self.epoch, self.epoch_step = self.epoch + 1, 0
            if self.step % self.options.save_every:
                self.save()
        finally:
            self.checkpoints.finish()

    def _epoch(self) -> Iterator[list[PackedInputs]]:
        """The batches of each step that is left of this epoch."""
        options, world = self.options, self.world
        examples, lengths = self.task.examples(self.epoch)
        steps = Steps(lengths, options.step_tokens, options.max_examples, options.seed)
        sampler = StepSampler(
            steps,
            self.hidden_size,
            epoch=self.epoch,
            start_step=self.epoch_step,
            rank=world.rank,
            world_size=world.size,
            parts=options.parts,
        )
        pin = world.device.type == "cuda"
        loader = iter(make_loader(examples, sampler, self.task.collate, workers=options.workers, pin_memory=pin))
        for _ in range(len(sampler) // options.parts):
            yield [next(loader) for _ in range(options.parts)]

    def train_step(self, batches: list[PackedInputs]) -> None:
        """One step of the optimizer. The loss is the mean over the labels of all ranks' batches."""
        world, last = self.world, len(batches) - 1
        counts = [self.task.counts(batch) for batch in batches]
        totals = world.total([sum(term) for term in zip(*counts, strict=True)])
        # Ranks' gradients are averaged, so each divides by its share of the total.
        shares = [max(1, total) / world.size for total in totals]
        torch.manual_seed(hash((self.options.seed, self.step, world.rank)) % 2**63)
        loss = torch.zeros((), device=world.device)
        for i, batch in enumerate(batches):
            on_device = batch.to(world.device, non_blocking=True) if world.device.type != "cpu" else batch
            with gradients_stay_local(self.model, i < last):
                with torch.autocast(world.device.type, torch.bfloat16, enabled=self.options.bf16):
                    part = self.task.loss(self.model, on_device, shares)
                part.backward()
            loss += part.detach()
            self._tokens += batch["batch"].total_tokens
        if self.options.max_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.max_norm, foreach=True)
        self.schedule.set(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._losses.append(loss)
        self.step, self.epoch_step = self.step + 1, self.epoch_step + 1

    def _after_step(self) -> None:
        options = self.options
        is_logged = self.step % options.log_every == 0 or self.step == options.steps
        is_saved = self.step % options.save_every == 0
        if is_logged or is_saved:
            self._log()
        if is_saved:
            self.save()

    def _log(self) -> None:
        """A row for the steps since the last one. This waits for the device, so it is not done in every step."""
        losses = torch.stack(self._losses)
        if self.world.size > 1:  # each rank has its share of the sum
            torch.distributed.all_reduce(losses)
            losses /= self.world.size
        values = losses.tolist()
        if not all(map(math.isfinite, values)):
            bad = self.step - len(values) + 1 + next(i for i, v in enumerate(values) if not math.isfinite(v))
            last = self.checkpoints.last()
            raise TrainingError(
                f"the loss of step {bad} is not a number; the last good checkpoint is {last or 'none'}. A smaller"
                " learning rate, a longer warm-up or gradient clipping may help"
            )
        now = time.perf_counter()
        tokens = self.world.total([self._tokens])[0]
        row = {
            "step": self.step,
            "epoch": self.epoch,
            "loss": sum(values) / len(values),
            "losses": values,
            "lr": max(group["lr"] for group in self.optimizer.param_groups),
            "tokens_per_second": tokens / (now - self._since),
        }
        self._losses, self._tokens, self._since = [], 0, now
        if self.world.is_main:
            with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self.on_log(row)

    def save(self) -> None:
        place = {"step": self.step, "epoch": self.epoch, "epoch_step": self.epoch_step}
        self.checkpoints.save(self.step, self.model, self.optimizer, place)


def _cut_log(path: Path, step: int) -> None:
    """Leave out what was logged after the checkpoint, whose steps come again, and what was cut off by a kill."""
    if path.is_file():
        whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        path.write_text("".join(line for line in whole if json.loads(line)["step"] <= step), encoding="utf-8")
