"""The steps of a run: forward, backward, clip, optimizer; what is logged, evaluated and saved between them."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastbert.data.batches import Steps, StepSampler, make_loader
from fastbert.packed_inputs import PackedInputs
from fastbert.training.checkpoints import Checkpoints
from fastbert.training.distributed import World, gradients_stay_local
from fastbert.training.schedules import Schedule
from fastbert.training.task import Phase, Task


class TrainingError(RuntimeError):
    """A run cannot go on. The message says why, and which checkpoint is the last good one."""


@dataclass(frozen=True)
class LoopOptions:
    """A run's length and habits.

    phases: one after the other; the last one's end is the run's. parts: batches a rank makes of its share of a step.
    max_norm: gradients longer than that are shortened (Pascanu et al. 2013); 0: not. bf16: products under autocast; the
    weights stay float32. save_every, log_every, evaluate_every: steps; 0: never before the end. patience: after so many
    evaluations without a better one the run ends; 0: never. keep: checkpoints. workers: of the DataLoader.
    group_by_length: examples of a step are of similar length.
    """

    phases: tuple[Phase, ...]
    parts: int = 1
    max_norm: float = 1.0
    bf16: bool = False
    seed: int = 0
    save_every: int = 1000
    log_every: int = 10
    evaluate_every: int = 0
    patience: int = 0
    keep: int = 2
    workers: int = 0
    group_by_length: bool = False

    @property
    def steps(self) -> int:
        return self.phases[-1].until


@dataclass
class Place:
    """Where a run stands: what a checkpoint holds beside weights and the optimizer's state."""

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0  # steps done in this epoch
    phase: int = 0
    best: float = math.nan  # of the task's metric
    best_step: int = 0
    worse: int = 0  # evaluations since the best one


class Loop:
    """Runs a task on one rank. All ranks make one alike, and call the same methods.

    `model` is what `wrap` gave. The random numbers of a step (dropout) follow from the seed, the step and the rank, so
    a run that was stopped goes on with the same bits. `evaluate` is called on all ranks and gives the same numbers on
    all; it returns True for what is to be kept as the best. `on_log` gets each row of the log.
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
        *,
        evaluate: Callable[[], dict[str, float]] | None = None,
        keep_best: Callable[[], None] = lambda: None,
        on_log: Callable[[dict[str, Any]], None] = lambda row: None,
        on_step: Callable[[int], None] = lambda tokens: None,
    ):
        self.task, self.model, self.hidden_size = task, model, hidden_size
        self.optimizer, self.schedule, self.world, self.options = optimizer, schedule, world, options
        self.evaluate, self.keep_best, self.on_log, self.on_step = evaluate, keep_best, on_log, on_step
        self.folder, self.place = folder, Place()
        self.checkpoints = Checkpoints(folder / "checkpoints", world, options.keep)
        self._losses: list[torch.Tensor] = []
        self._tokens, self._since = 0, time.perf_counter()

    def resume(self) -> bool:
        """Go on with the last checkpoint; False if there is none. Raises CheckpointError."""
        path = self.checkpoints.last()
        if path is not None:
            self.place = Place(**self.checkpoints.load(path, self.model, self.optimizer, vars(Place())))
        if self.world.is_main:
            _cut_log(self.folder / "log.jsonl", self.place.step)
        return path is not None

    def run(self) -> None:
        """Train to the end of the last phase. Raises TrainingError: the loss is no number any more."""
        self.model.train()
        self._since = time.perf_counter()
        place = self.place
        try:
            while not self.is_over:
                phase = self.options.phases[place.phase]
                for batches in self._epoch(phase):
                    self.train_step(batches)
                    self._after_step()
                    if self.is_over or place.step == phase.until:
                        break
                else:
                    place.epoch, place.epoch_step = place.epoch + 1, 0
                if place.step == phase.until and place.phase + 1 < len(self.options.phases):
                    place.phase, place.epoch, place.epoch_step = place.phase + 1, place.epoch + 1, 0
            if self.checkpoints.newest != place.step:
                self.save()
        finally:
            self.checkpoints.finish()

    @property
    def is_over(self) -> bool:
        patience = self.options.patience
        return self.place.step >= self.options.steps or 0 < patience <= self.place.worse

    def _epoch(self, phase: Phase) -> Iterator[list[PackedInputs]]:
        """The batches of each step that is left of this epoch."""
        sampler, examples = sampler_of(self.task, phase, self.options, self.hidden_size, self.world, self.place)
        pin, parts = self.world.device.type == "cuda", self.options.parts
        collate, workers = self.task.collate(phase), self.options.workers
        loader = iter(make_loader(examples, sampler, collate, workers=workers, pin_memory=pin))
        for _ in range(len(sampler) // parts):
            yield [next(loader) for _ in range(parts)]

    def train_step(self, batches: list[PackedInputs]) -> None:
        """One step of the optimizer. The loss is the mean over the labels of all ranks' batches."""
        place, world, tokens = self.place, self.world, 0
        counts = [self.task.counts(batch) for batch in batches]
        totals = world.total([sum(term) for term in zip(*counts, strict=True)])
        # Ranks' gradients are averaged, so each divides by its share of the total.
        shares = [max(1, total) / world.size for total in totals]
        torch.manual_seed(hash((self.options.seed, place.step, world.rank)) % 2**63)
        loss = torch.zeros((), device=world.device)
        for i, batch in enumerate(batches):
            on_device = batch.to(world.device, non_blocking=True) if world.device.type != "cpu" else batch
            with gradients_stay_local(self.model, i < len(batches) - 1):
                with torch.autocast(world.device.type, torch.bfloat16, enabled=self.options.bf16):
                    part = self.task.loss(self.model, on_device, shares)
                part.backward()
            loss += part.detach()
            tokens += batch["batch"].total_tokens
        if self.options.max_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.max_norm, foreach=True)
        self.schedule.set(place.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._losses.append(loss)
        self._tokens += tokens
        place.step, place.epoch_step = place.step + 1, place.epoch_step + 1
        self.on_step(tokens)

    def _after_step(self) -> None:
        options, step, metrics = self.options, self.place.step, dict[str, float]()
        is_last = step == options.steps
        is_evaluated = self.evaluate is not None and (is_last or _is_due(step, options.evaluate_every))
        is_saved = _is_due(step, options.save_every)
        if not (is_evaluated or is_saved or is_last or _is_due(step, options.log_every)):
            return
        row = self._read_losses()
        if is_evaluated:
            assert self.evaluate is not None
            metrics = self.evaluate()
            self.model.train()
            self._judge(metrics)
        self._log(row | metrics)
        if is_saved:
            self.save()
        self._since = time.perf_counter()  # evaluation and saving are not training

    def _judge(self, metrics: dict[str, float]) -> None:
        place, task = self.place, self.task
        if task.metric is None:
            return
        value = metrics[f"eval_{task.metric}"]
        is_better = value > place.best if task.more_is_better else value < place.best
        if is_better or math.isnan(place.best):
            place.best, place.best_step, place.worse = value, place.step, 0
            self.keep_best()
        else:
            place.worse += 1

    def _read_losses(self) -> dict[str, Any]:
        """The row of the steps since the last one. This waits for the device, so it is not done in every step."""
        losses, place = torch.stack(self._losses), self.place
        if self.world.size > 1:  # each rank has its share of the sum
            torch.distributed.all_reduce(losses)
            losses /= self.world.size
        values = losses.tolist()
        if not all(map(math.isfinite, values)):
            bad = place.step - len(values) + 1 + next(i for i, v in enumerate(values) if not math.isfinite(v))
            self.checkpoints.finish()
            last = self.checkpoints.last()
            raise TrainingError(
                f"the loss of step {bad} is not a number; the last good checkpoint is {last or 'none'}. A smaller"
                " learning rate, a longer warm-up or gradient clipping may help"
            )
        tokens = self.world.total([self._tokens])[0]
        row = {
            "step": place.step,
            "epoch": place.epoch,
            "loss": sum(values) / len(values),
            "losses": values,
            "lr": max(group["lr"] for group in self.optimizer.param_groups),
            "tokens": tokens,
            "tokens_per_second": tokens / (time.perf_counter() - self._since),
        }
        self._losses, self._tokens = [], 0
        return row

    def _log(self, row: dict[str, Any]) -> None:
        if self.world.is_main:
            with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self.on_log(row)

    def save(self) -> None:
        self.checkpoints.save(self.place.step, self.model, self.optimizer, vars(self.place))


def sampler_of(
    task: Task, phase: Phase, options: LoopOptions, hidden_size: int, world: World, place: Place
) -> tuple[StepSampler, Any]:
    """(the batches of what is left of an epoch, its examples)."""
    examples, lengths = task.examples(place.epoch, phase)
    steps = Steps(lengths, phase.step_tokens, phase.max_examples, options.seed, options.group_by_length)
    sampler = StepSampler(
        steps,
        hidden_size,
        epoch=place.epoch,
        start_step=place.epoch_step,
        rank=world.rank,
        world_size=world.size,
        parts=options.parts,
    )
    return sampler, examples


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _cut_log(path: Path, step: int) -> None:
    """Leave out what was logged after the checkpoint, whose steps come again, and what was cut off by a kill."""
    if path.is_file():
        whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        beside = path.with_suffix(".writing")
        beside.write_text("".join(line for line in whole if json.loads(line)["step"] <= step), encoding="utf-8")
        os.replace(beside, path)
