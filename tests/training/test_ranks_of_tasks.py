"""Every task on two ranks, on a CPU's kernels and on a GPU's in the interpreter: losses and weights of one process.

DDP's reducer and FSDP2 stand at AccumulateGrad nodes, where Python does not see them: an op that hands on a gradient
in any other way than autograd's leaves ranks apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import interpreter
import pytest
import slack_tasks
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pretraining_runs import write_text
from test_pretraining_ranks import make_task as two_models
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from training_runs import ALONE, losses_of

from fastbert.backend import use_backend
from fastbert.native.availability import triton_error
from fastbert.training.distributed import ProcessGroup, wrap
from fastbert.training.loop import Loop, LoopOptions
from fastbert.training.optimizers import make_optimizer, parameter_groups
from fastbert.training.schedules import Schedule
from fastbert.training.task import Phase

STEPS, RATE = 3, 3e-3
# Softmax over the places of a text does not see it: its gradient is rounding, of which Adam makes steps of any sign.
UNSEEN = "qa_outputs.bias"
# How many batches a rank makes of its share: "ranking" in two is cached gradients, and "masked" accumulation.
PARTS = {"classes": (1,), "tags": (1,), "answers": (1,), "ranking": (1, 2), "masked": (2,)}
TWO_MODELS = {"rtd": (1,), "distil": (1,)}


class Run(NamedTuple):
    name: str
    parts: int
    wrapping: str
    folder: Path

    def train(self, process_group: ProcessGroup) -> None:
        """rank 0 leaves the log of the losses, and the whole weights."""
        own = self.folder / f"rank-{process_group.rank}-of-{process_group.size}"
        own.mkdir(parents=True)
        task: Any = two_models(self.name) if self.name in TWO_MODELS else self._task(own)
        phase = Phase(STEPS, 10_000, max_examples=4, max_length=24)
        options = LoopOptions((phase,), self.parts, save_every=0, log_every=1)
        wrapped = wrap(task.model, process_group, self.wrapping, bf16=False)
        optimizer = make_optimizer("adamw", parameter_groups(task.model, RATE), (0.9, 0.98), 1e-6)
        loop = Loop(
            task, wrapped, 32, optimizer, Schedule(optimizer, "linear", 9, 1), process_group, self.folder, options
        )
        loop.run()
        whole = get_model_state_dict(loop.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if process_group.is_main:
            torch.save(whole, self.folder / "weights.pt")

    def _task(self, own: Path) -> Any:
        return slack_tasks.make(self.name, own, self.folder.parent / "text.txt")[0]


def runs_in(folder: Path, tasks: dict[str, tuple[int, ...]], wrapping: str) -> list[Run]:
    made = [(name, parts) for name, of_task in tasks.items() for parts in of_task]
    return [Run(name, parts, wrapping, folder / f"{name}-{parts}-{wrapping}") for name, parts in made]


def rank_of(rank: int, size: int, folder: Path, tasks: dict[str, tuple[int, ...]], wrapping: str, backend: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    torch.set_num_threads(1)
    if backend == "triton":
        interpreter.mend_triton_interpreter()
    process_group = ProcessGroup(rank, size, torch.device("cpu"), *[dist.new_group(backend="gloo") for _ in range(2)])
    with use_backend(backend):
        for run in runs_in(folder, tasks, wrapping):
            run.train(process_group)
    dist.destroy_process_group()


def check(folder: Path, tasks: dict[str, tuple[int, ...]], wrapping: str, backend: str) -> None:
    """One process goes first: it makes the vocabulary that ranks then find, as rank 0 does in a run."""
    write_text(folder / "text.txt")
    runs = runs_in(folder, tasks, wrapping)
    alone = [run._replace(parts=1, folder=folder / f"{run.name}-{run.parts}-alone") for run in runs]
    with use_backend(backend):
        for one in alone:
            one.train(ALONE)
    mp.spawn(rank_of, (2, folder, tasks, wrapping, backend), nprocs=2)
    for run, one in zip(runs, alone, strict=True):
        expected = losses_of(one.folder)
        assert len(set(expected)) == STEPS
        # Of a loss of 134 the last bit is 1.5e-5.
        assert losses_of(run.folder) == pytest.approx(expected, rel=1e-6, abs=2e-5), run
        weights, right = torch.load(run.folder / "weights.pt"), torch.load(one.folder / "weights.pt")
        assert weights.keys() == right.keys()
        for name, weight in right.items():  # Adam divides by the gradients' size: those of rounding differ by more
            bound = STEPS * RATE if name == UNSEEN else 1e-4
            assert (weights[name] - weight).abs().max() <= bound, (run, name)


def marks(backend: str) -> list[pytest.MarkDecorator]:
    """Two processes take 10 core-seconds to start: tests/ops/test_who_takes_gradients.py has DDP's reducer in one."""
    if backend == "cpu":
        return [pytest.mark.full]
    return [pytest.mark.full, pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))]


@pytest.mark.parametrize("backend", [pytest.param(name, marks=marks(name)) for name in ("cpu", "triton")])
@pytest.mark.parametrize("wrapping", ("ddp", "fsdp"))
@pytest.mark.parametrize("tasks", (PARTS, TWO_MODELS), ids=("one model", "two models"))
def test_two_ranks_are_one_process(tmp_path, tasks, wrapping, backend):
    check(tmp_path, tasks, wrapping, backend)
