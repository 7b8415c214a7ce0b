"""AdamW whose rows take their steps late, under random programs of steps, changed options and states saved and loaded.

A program is drawn first, and then run by ours, and by torch.optim.AdamW in float64 and in float32, with the values of a
seed. What each step looks up, and all weights now and then, are compared by the error rule. A new step is a function
here: it draws what it does, and returns it as a function of a `Run`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from draw import Draw
from fuzz_driver import Fuzzer
from fuzz_ops import backends
from isas import backend_with_isa
from judging import Results, assert_all_close, judge
from torch.optim.lr_scheduler import OneCycleLR

import fastbert
from fastbert.training.optimizers import AdamW, clip_and_step

REPETITIONS = (64,)  # of a program that fails, with other values
SIZES = ((40, 16), (40, 16), (7, 33), (100, 3), (64,))  # of weights; the first is always a table of rows
BETAS = ((0.9, 0.999), (0.95, 0.999), (0.85, 0.99), (0.5, 0.9), (0.0, 0.999), (0.9, 0.5))
VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda t: t,
    "large": lambda t: t * 1000,
    "small": lambda t: t * 1e-4,
    "zeros": lambda t: t * 0,
}


@dataclass
class Run:
    """One optimizer under a program: ours, or torch's in a dtype. All values follow from the seed."""

    is_ours: bool
    dtype: torch.dtype
    seed: int
    sizes: list[tuple[int, ...]]
    options: dict[str, Any]
    weights: list[torch.nn.Parameter] = field(default_factory=list)
    optimizer: Any = None
    schedule: OneCycleLR | None = None
    saved: dict[str, Any] | None = None
    seen: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.weights = [torch.nn.Parameter(self.normal(size)) for size in self.sizes]
        self.optimizer = self.make([{"params": [weight]} for weight in self.weights])

    def make(self, groups: list[dict[str, Any]]) -> Any:
        return (AdamW if self.is_ours else torch.optim.AdamW)(groups, **self.options)

    def normal(self, size: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(size, generator=self.generator).to(self.dtype)

    def groups(self, which: int | None) -> list[dict[str, Any]]:
        found = self.optimizer.param_groups
        return found if which is None else [found[which % len(found)]]

    def catch_up(self, rows: torch.Tensor | None = None) -> None:
        if self.is_ours:
            self.optimizer.catch_up(rows)

    def look_at_all(self) -> None:
        self.catch_up()
        self.seen += [weight.detach().clone() for weight in self.weights]


Action = Callable[[Run], None]


def train(draw: Draw) -> Action:
    """A step: rows are looked up, gradients come, some of them none, and the optimizer takes them."""
    share, repeated = draw.choice((0.1, 0.0, 0.5, 1.0)), draw.flag(4)
    form = draw.choice(("rows", "dense", "none"))
    values, others = draw.choice(VALUES), draw.choice((*VALUES, "none"))
    max_norm, call = draw.choice((0.0, 1.0, 1e9)), draw.choice(("clip_and_step", "step"))
    backend = draw.choice(name for name in backends() if name != "triton")
    draw.note(f"  {share} of the rows, {form}, {values}, others {others}, norm {max_norm}, {call}, {backend}")

    def act(run: Run) -> None:
        table = run.weights[0]
        rows = (torch.rand(len(table), generator=run.generator) < share).nonzero().flatten()
        run.catch_up(rows if rows.numel() else None)
        run.seen.append(table.detach()[rows])
        gradient = torch.zeros_like(table)
        gradient[rows] = VALUES[values](run.normal((len(rows), *table.shape[1:])))
        for weight in run.weights[1:]:
            made = run.normal(weight.shape)
            weight.grad = None if others == "none" else VALUES[others](made)
        if form == "none":
            table.grad = None
        elif form == "dense" or not run.is_ours or call == "step":  # sparse ones are not for torch's own step
            table.grad = gradient
        else:
            halves = (0.5, 0.5) if repeated else (1.0,)
            at, parts = rows.repeat(len(halves)), torch.cat([gradient[rows] * half for half in halves])
            table.grad = torch.sparse_coo_tensor(at[None], parts, table.shape, check_invariants=True)
        step(run, max_norm, call, backend)
        if run.schedule is not None and run.schedule.last_epoch < run.schedule.total_steps - 1:
            run.schedule.step()

    return act


def step(run: Run, max_norm: float, call: str, backend: str) -> None:
    if run.is_ours and call != "step":
        with backend_with_isa(backend) as kind, fastbert.use_backend(kind):
            clip_and_step(run.optimizer, max_norm)
        return
    if max_norm:
        torch.nn.utils.clip_grad_norm_(run.weights, max_norm)
    run.optimizer.step()


def option(name: str, *values: Any) -> Callable[[Draw], Action]:
    """One group's option, or that of all, becomes another."""

    def change(draw: Draw) -> Action:
        value, which = draw.choice(range(len(values))), draw.choice((None, 0, 1))
        draw.note(f"  {values[value]} of group {'s' if which is None else which}")

        def act(run: Run) -> None:
            for group in run.groups(which):
                group[name] = values[value]

        return act

    return change


def rate_tensor(draw: Draw) -> Action:
    """A rate that is a tensor, and is written to."""
    factor = draw.choice((0.5, 2.0))

    def act(run: Run) -> None:
        for group in run.groups(None):
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float64).clamp(1e-4, 1e-1)
            group["lr"].mul_(factor)

    return act


def one_cycle(draw: Draw) -> Action:
    """Rates and betas of each of the next steps are others."""
    steps = draw.integer(3, 12)

    def act(run: Run) -> None:
        for group in run.groups(None):
            group["lr"] = float(group["lr"])
        run.schedule = OneCycleLR(run.optimizer, 3e-2, total_steps=steps)

    return act


def look(draw: Draw) -> Action:
    return Run.look_at_all


def write(draw: Draw) -> Action:
    """Into the weights, behind catch_up."""

    def act(run: Run) -> None:
        run.catch_up()
        with torch.no_grad():
            for weight in run.weights:
                weight.mul_(0.5)

    return act


def save(draw: Draw) -> Action:
    def act(run: Run) -> None:
        run.saved = copy.deepcopy(run.optimizer.state_dict())

    return act


def load(draw: Draw) -> Action:
    """A state from before, into the weights of now."""

    def act(run: Run) -> None:
        if run.saved is not None and len(run.saved["param_groups"]) == len(run.optimizer.param_groups):
            run.optimizer.load_state_dict(copy.deepcopy(run.saved))
            run.schedule = None

    return act


def go_on(draw: Draw) -> Action:
    """Another optimizer, with the state of this one, on copies of the weights; or a copy of both."""
    how = draw.choice(("state_dict", "deepcopy", "pickle"))
    draw.note(f"  {how}")

    def act(run: Run) -> None:
        if how == "state_dict":
            state = run.optimizer.state_dict()
            run.weights = [torch.nn.Parameter(weight.detach().clone()) for weight in run.weights]
            run.optimizer = run.make([{"params": [weight]} for weight in run.weights])
            run.optimizer.load_state_dict(state)
        else:
            made = copy.deepcopy(run.optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(run.optimizer))
            run.optimizer, run.weights = made, [group["params"][0] for group in made.param_groups]
        run.schedule = None

    return act


def forget(draw: Draw) -> Action:
    """The means, or how many steps there were."""
    what = draw.choice(("all", "steps"))

    def act(run: Run) -> None:
        if what == "all":
            run.optimizer.state.clear()
        for state in run.optimizer.state.values():
            state["step"].fill_(1.0)

    return act


def add_group(draw: Draw) -> Action:
    size = draw.choice(SIZES)

    def act(run: Run) -> None:
        if len(run.weights) < 6 and run.schedule is None:
            run.weights.append(torch.nn.Parameter(run.normal(size)))
            run.optimizer.add_param_group({"params": [run.weights[-1]]})

    return act


STEPS: dict[str, Callable[[Draw], Action]] = {
    "train": train,
    "lr": option("lr", 1e-3, 1e-2, 0.0, 0.1),
    "betas": option("betas", *BETAS),
    "eps": option("eps", 1e-8, 1e-3, 1e-12),
    "weight_decay": option("weight_decay", 0.0, 0.1, 1.0),
    "maximize": option("maximize", True, False),
    **{f.__name__: f for f in (rate_tensor, one_cycle, look, write, save, load, go_on, forget, add_group)},
}


def run_case(draw: Draw) -> None:
    sizes = [SIZES[0], *(draw.choice(SIZES) for _ in range(draw.integer(0, 2)))]
    options = {"lr": 1e-2, "weight_decay": draw.choice((0.1, 0.0)), "betas": draw.choice(BETAS)}
    options |= {"amsgrad": draw.flag(8), "fused": draw.choice((None, True))}
    draw.note(f"weights {sizes}, {options}")
    actions = list[Action]()
    for _ in range(draw.integer(1, 24)):
        name = draw.choice(("train", *STEPS)) if draw.flag() else "train"
        draw.note(name)
        actions.append(STEPS[name](draw))
    draw.doing = "a program"
    seed = draw.seed()

    def results(number: int) -> Results:
        kinds = ((True, torch.float32), (False, torch.float64), (False, torch.float32))
        runs = [Run(is_ours, dtype, seed + number, list(sizes), options) for is_ours, dtype in kinds]
        for run in runs:
            for act in actions:
                act(run)
            run.look_at_all()
        ours, oracle, baseline = ({f"look {i}": t for i, t in enumerate(run.seen)} for run in runs)
        assert ours.keys() == oracle.keys() == baseline.keys()
        return ours, oracle, baseline

    judge(results, assert_all_close, REPETITIONS)


FUZZER = Fuzzer("optimizer", run_case, cases=30)
