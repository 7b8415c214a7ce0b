"""The steps of a run: forward, backward, clip, optimizer; what is logged, evaluated and saved between them."""

from __future__ import annotations

import gc
import json
import math
import signal
import time
import warnings
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastbert.data.batches import Steps, StepSampler
from fastbert.data.loader import WorkerKilled
from fastbert.errors import TrainingError
from fastbert.files import write_text
from fastbert.importing import collector_spares_what_is_there
from fastbert.packed_inputs import PackedInputs
from fastbert.training.distributed import ProcessGroup
from fastbert.training.optimizers import catch_up
from fastbert.training.schedules import Schedule
from fastbert.training.stopping import SIGNALS, leave_by, signals_wait
from fastbert.training.task import Phase, Task
from fastbert.training.train_step import TrainStep

_LOSSES = 1024  # that lie apart until they are looked at


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
class TrainState:
    """Where a run stands: what a checkpoint holds beside weights and the optimizer's state."""

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0  # steps done in this epoch
    phase: int = 0
    best: float = math.nan  # of the task's metric
    best_step: int = 0
    worse: int = 0  # evaluations since the best one
    data: int = 0  # a checksum of the lengths of this epoch's examples


class Loop:
    """Runs a task on one rank. All ranks make one alike, and call the same methods.

    `model` is what `wrap` gave. The random numbers of a step (dropout) follow from the seed, the step and the rank, so
    a run that was stopped goes on with the same bits. `evaluate` is called on all ranks and gives the same numbers on
    all; `keep_best` is called when they are the best so far. `on_log` gets each row of the log. `at_end` is called
    behind the last step, while the last checkpoint is written: it leaves the weights as they are, and the disk's room
    to the checkpoint. `say` gets a line where a run ends before its last step.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        hidden_size: int,
        optimizer: Any,
        schedule: Schedule,
        process_group: ProcessGroup,
        folder: Path,
        options: LoopOptions,
        *,
        evaluate: Callable[[], dict[str, float]] | None = None,
        keep_best: Callable[[], None] = lambda: None,
        at_end: Callable[[], None] = lambda: None,
        on_log: Callable[[dict[str, Any]], None] = lambda row: None,
        on_step: Callable[[int], None] = lambda tokens: None,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.task, self.model, self.hidden_size = task, model, hidden_size
        self.optimizer, self.schedule, self.process_group, self.options = optimizer, schedule, process_group, options
        self.evaluate, self.keep_best, self.at_end = evaluate, keep_best, at_end
        self.on_log, self.on_step, self.say = on_log, on_step, say
        self.folder, self.state = folder, TrainState()
        # Here: torch.distributed.checkpoint takes half a second, which a dry run and a refused one need not wait for.
        from fastbert.training.checkpoints import Checkpoints

        self.checkpoints = Checkpoints(folder / "checkpoints", process_group, options.keep)
        self._step = TrainStep(task, model, optimizer, process_group, max_norm=options.max_norm, bf16=options.bf16)
        self._losses: list[torch.Tensor] = []  # of steps, which were not looked at: (), or of many (n,)
        self._tokens, self._since = 0, time.perf_counter()
        self._signals: list[int] = []
        self._stop: signal.Signals | None = None  # what all ranks have agreed on

    def resume(self) -> bool:
        """Go on with the last checkpoint; False if there is none. Raises CheckpointError."""
        path = self.checkpoints.last()
        if path is not None:
            self.state = TrainState(**self.checkpoints.load(path, self.model, self.optimizer, vars(TrainState())))
        if self.process_group.is_main:
            _cut_log(self.folder / "log.jsonl", self.state.step)
        return path is not None

    def run(self) -> None:
        """Train to the end of the last phase. SIGINT and SIGTERM end it after a step, which is saved.

        Raises TrainingError: a loss or a weight is no number, the data have changed, or another process is gone.
        """
        self.model.train()
        self._since = time.perf_counter()
        gc.collect()
        try:
            with collector_spares_what_is_there(), signals_wait() as self._signals:
                self._run()
                if not self._stop and self.checkpoints.newest != self.state.step:
                    self._save()
                try:
                    if not self._stop:
                        self.at_end()
                finally:  # also where this rank has failed: the others wait for it here
                    self.checkpoints.finish()
        except BaseException as error:
            if self.process_group.size == 1:  # else the others are not here to finish it
                self.checkpoints.finish()
            if isinstance(error, RuntimeError) and not isinstance(error, TrainingError):
                raise self._explained(error) from error
            raise
        if not self._stop and self.state.step < self.options.steps:
            state, worse = self.state, f"{self.state.worse} evaluations without a better one"
            self.say(f"stopped after step {state.step} of {self.options.steps}: {worse} than step {state.best_step}'s")
        if self._stop:
            if self.process_group.is_main:
                name = signal.Signals(self._stop).name
                warnings.warn(
                    f"{name}: stopped after step {self.state.step}, which is saved; resume goes on", stacklevel=2
                )
            leave_by(self._stop)

    def _run(self) -> None:
        state, phases = self.state, self.options.phases
        while not self.is_over:
            if state.step >= phases[state.phase].until:
                state.phase, state.epoch, state.epoch_step = state.phase + 1, state.epoch + 1, 0
                continue
            with closing(self._epoch(phases[state.phase])) as epoch:
                for batches in epoch:
                    self.train_step(batches)
                    self._after_step()
                    if self._stop:
                        return
                    if self.is_over or state.step == phases[state.phase].until:
                        break
                else:
                    state.epoch, state.epoch_step = state.epoch + 1, 0

    @property
    def is_over(self) -> bool:
        patience = self.options.patience
        return self.state.step >= self.options.steps or 0 < patience <= self.state.worse

    def _epoch(self, phase: Phase) -> Generator[list[PackedInputs]]:
        """The batches of each step that is left of this epoch."""
        sampler, examples = sampler_of(self.task, phase, self.options, self.hidden_size, self.process_group, self.state)
        collate = self.task.collate(phase)
        self._check_data(zlib.crc32(sampler.steps.lengths.tobytes()))
        with closing(self._step.batches(collate, examples, sampler, self.options.workers)) as steps:
            yield from steps

    def _check_data(self, checksum: int) -> None:
        state = self.state
        if state.epoch_step and checksum != state.data:
            raise TrainingError(
                f"the training data are not those of the checkpoint of step {state.step}: its epoch cannot go on."
                " Restore the files, or begin a new run from its model"
            )
        ranks = self.process_group.gather(checksum)
        if differing := [rank for rank, other in enumerate(ranks) if other != ranks[0]]:
            raise TrainingError(f"rank {differing[0]} has other training data than rank 0: give all the same files")
        state.data = checksum

    def train_step(self, batches: Sequence[PackedInputs]) -> None:
        """One step of the optimizer. The loss is the mean over the labels of all ranks' batches."""
        state, process_group = self.state, self.process_group
        counts = [self.task.counts(batch) for batch in batches]
        totals = self._agree([sum(term) for term in zip(*counts, strict=True)])
        # Ranks' gradients are averaged, so each divides by its share of the total.
        shares = [max(1, total) / process_group.size for total in totals]
        seed = hash((self.options.seed, state.step, process_group.rank)) % 2**63
        _seed(process_group.device, seed)
        tokens = sum(batch["batch"].total_tokens for batch in batches)
        self.schedule.set(state.step)
        self._losses.append(self._step(batches, shares, seed))
        if len(self._losses) == _LOSSES:
            self._losses = [_joined(self._losses)]
        self._tokens += tokens
        state.step, state.epoch_step = state.step + 1, state.epoch_step + 1
        self.on_step(tokens)

    def _agree(self, counts: list[int]) -> list[int]:
        """The sums over all ranks; the same message says who got a signal, and who has written its checkpoint."""
        stops = [int(number in self._signals) for number in SIGNALS]
        *totals, interrupted, terminated, written = self.process_group.total(
            [*counts, *stops, int(self.checkpoints.is_written)]
        )
        self._stop = signal.SIGTERM if terminated else signal.SIGINT if interrupted else None
        if written == self.process_group.size:
            self.checkpoints.finish()
        return totals

    def _after_step(self) -> None:
        options, step, metrics = self.options, self.state.step, dict[str, float]()
        is_last = step == options.steps
        is_evaluated = self.evaluate is not None and (is_last or _is_due(step, options.evaluate_every))
        is_saved = _is_due(step, options.save_every) or self._stop is not None
        if not (is_evaluated or is_saved or is_last or _is_due(step, options.log_every)):
            return
        row = self._read_losses()
        if is_evaluated or is_saved or is_last:
            catch_up(self.optimizer)
            self._check_weights()
        if is_evaluated:
            assert self.evaluate is not None
            metrics = self.evaluate()
            self.model.train()
            self._judge(metrics)
        self._log(row | metrics)
        if is_saved:
            self._save()
        self._since = time.perf_counter()  # evaluation and saving are not training

    def _judge(self, metrics: dict[str, float]) -> None:
        state, task = self.state, self.task
        if task.metric is None:
            return
        value = metrics[f"eval_{task.metric}"]
        is_better = value > state.best if task.more_is_better else value < state.best
        if is_better or math.isnan(state.best):
            state.best, state.best_step, state.worse = value, state.step, 0
            self.keep_best()
        else:
            state.worse += 1

    def _read_losses(self) -> dict[str, Any]:
        """The row of the steps since the last one. This waits for the device, so it is not done in every step."""
        own, state = _joined(self._losses), self.state
        losses = own.clone()
        if self.process_group.size > 1:  # each rank has its share of the sum
            dist.all_reduce(losses)
            losses /= self.process_group.size
        values = losses.tolist()
        if not all(map(math.isfinite, values)):
            i = next(i for i, v in enumerate(values) if not math.isfinite(v))
            raise self._lost(f"the loss of step {state.step - len(values) + 1 + i} is not a number", own[i])
        tokens = self.process_group.total([self._tokens])[0]
        row = {
            "step": state.step,
            "epoch": state.epoch,
            "loss": sum(values) / len(values),
            "losses": values,
            "lr": max(group["lr"] for group in self.optimizer.param_groups),
            "tokens": tokens,
            "tokens_per_second": tokens / (time.perf_counter() - self._since),
        }
        self._losses, self._tokens = [], 0
        return row

    def _check_weights(self) -> None:
        """A step may spoil them whose own loss was a number: nothing of that is saved."""
        from torch.distributed.tensor import DTensor  # which the checkpoints have imported

        shards = [p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters()]
        norms = torch.stack(torch._foreach_norm([shard.detach() for shard in shards]))
        if any(self.process_group.gather(not bool(norms.isfinite().all()))):
            raise self._lost(f"step {self.state.step} has made weights that are not numbers", norms)

    def _lost(self, what: str, own: torch.Tensor) -> TrainingError:
        """`own`: what is no number on some ranks. Called on all of them."""
        where = [str(r) for r, bad in enumerate(self.process_group.gather(not bool(own.isfinite().all()))) if bad]
        ranks = f" (on rank {', '.join(where)} of {self.process_group.size})" if self.process_group.size > 1 else ""
        self.checkpoints.finish()
        return TrainingError(
            f"{what}{ranks}; the last good checkpoint is {self.checkpoints.last() or 'none'}. A smaller learning rate,"
            " a longer warm-up or gradient clipping may help"
        )

    def _explained(self, error: RuntimeError) -> RuntimeError:
        """What has no class of its own in torch."""
        text, last = str(error), self.checkpoints.last() or "none"
        if isinstance(error, WorkerKilled):
            return TrainingError(
                f"after step {self.state.step} a process that makes batches was killed, perhaps for want of memory; the"
                f" last good checkpoint is {last}. Fewer workers need less"
            )
        if self.process_group.size > 1 and (isinstance(error, dist.DistError) or "gloo" in text):
            return TrainingError(
                f"after step {self.state.step} rank {self.process_group.rank} lost the others: one of them has ended,"
                f" or did not answer in time; the last good checkpoint is {last} ({text.splitlines()[0]})"
            )
        return error

    def _log(self, row: dict[str, Any]) -> None:
        path = self.folder / "log.jsonl"
        if self.process_group.is_main:
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                last = self.checkpoints.last() or "none"
                raise TrainingError(f"{path}: {error.strerror}; the last good checkpoint is {last}") from None
        self.on_log(row)

    def _save(self) -> None:
        is_last = self._stop is not None or self.is_over
        self.checkpoints.save(self.state.step, self.model, self.optimizer, vars(self.state), is_last=is_last)


def sampler_of(
    task: Task, phase: Phase, options: LoopOptions, hidden_size: int, process_group: ProcessGroup, state: TrainState
) -> tuple[StepSampler, Any]:
    """(the batches of what is left of an epoch, its examples)."""
    examples, lengths = task.examples(state.epoch, phase)
    steps = Steps(lengths, phase.step_tokens, phase.max_examples, options.seed, options.group_by_length)
    sampler = StepSampler(
        steps,
        hidden_size,
        epoch=state.epoch,
        start_step=state.epoch_step,
        rank=process_group.rank,
        world_size=process_group.size,
        parts=options.parts,
    )
    return sampler, examples


def _joined(losses: list[torch.Tensor]) -> torch.Tensor:
    """(n,), the oldest first, on the device: to look at them is a wait."""
    return torch.cat([loss.view(-1) for loss in losses])


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _cut_log(path: Path, step: int) -> None:
    """Leave out what was logged after the checkpoint, whose steps come again, and what was cut off by a kill."""
    if path.is_file():
        whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        write_text(path, "".join(line for line in whole if json.loads(line)["step"] <= step))


def _seed(device: torch.device, seed: int) -> None:
    """torch.manual_seed, which also notes a stack trace for each kind of device that is not there: 0.1 ms or more."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
