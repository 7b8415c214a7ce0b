"""Captured training steps against the same steps that run each time, bit for bit; and both against a plain loop.

Run as a program, with "capture" or "loop", in a process of its own: what a broken capture leaves behind ends with it.
"""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import fastbert
from benchmarks.gpu.record import failures_of_a_kernel, say_result
from benchmarks.gpu.simulated.no_graphs import NoGraphs
from benchmarks.gpu.steps.batches import Texts, shrunk
from benchmarks.gpu.steps.ways import MAX_NORM, graphs_on, op_by_op, plain_step
from benchmarks.gpu.subject import FIELDS
from fastbert.backend import use_backend
from fastbert.cuda_graphs.buckets import Sizes
from fastbert.cuda_graphs.capture import Graphs
from fastbert.packed_inputs import PackedInputs
from fastbert.testing.cases import RAGGED_32
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference
from fastbert.training.graphed import GraphedStep
from fastbert.training.optimizers import make_optimizer, parameter_groups

STEPS, LOOP_STEPS = 50, 6
ROOMS = (1024, 4096)  # tokens of the two buckets
SMOKE_STEPS, SMOKE_LOOP_STEPS, SMOKE_ROOMS = 6, 3, (24, 80)
BUCKETS_OF_STEPS = ((0,), (1,), (0, 1), (1, 0), (0, 0))  # of the batches of a step, in turn
BETAS = (0.9, 0.999)
# Of the loop: above most gradients. Else a step goes by their signs, and where one is near 0 rounding decides on it.
LOOP_EPS = 1e-3
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
Tensors = dict[str, torch.Tensor]


class Setting(NamedTuple):
    """Where, and how much of it."""

    device: torch.device
    smoke: bool

    @property
    def fields(self) -> dict[str, Any]:
        return FIELDS["tiny-words" if self.smoke else "bert-base"]

    @property
    def rooms(self) -> tuple[int, ...]:
        return SMOKE_ROOMS if self.smoke else ROOMS

    @property
    def lengths(self) -> list[int]:
        return [shrunk(length) if self.smoke else length for length in RAGGED_32.lengths]


class CountedGraphs:
    """How often something was captured, and how often repeated."""

    def __init__(self, graphs: Graphs):
        self.graphs, self.captures, self.replays = graphs, 0, 0
        self.unsupported, self.warm = graphs.unsupported, graphs.warm
        self.begin, self.end, self.nbytes, self.free = graphs.begin, graphs.end, graphs.nbytes, graphs.free

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        replay = self.graphs.capture(run)

        def counted() -> None:
            self.replays += 1
            replay()

        return counted


def mean_loss(model: Any, batch: PackedInputs, total: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, num_items_in_batch=total).loss
    return loss


def make_step(setting: Setting, graphs: Graphs, eps: float = 1e-8, **changes: Any) -> GraphedStep:
    """Of a masked language model with dropout, AdamW with two groups, clipping, and a bucket for each room."""
    torch.manual_seed(0)
    config = fastbert.EncoderConfig.of_family("bert", **{**setting.fields, **changes})
    with torch.device(setting.device):
        model = fastbert.BertForMaskedLM(config)
    optimizer = make_optimizer("adamw", parameter_groups(model, 1e-4), BETAS, eps)
    step = GraphedStep(model.train(), optimizer, mean_loss, max_norm=MAX_NORM, graphs=graphs)
    shortest, longest = min(setting.lengths), max(setting.lengths)
    step.buckets.plan([Sizes(room, room // shortest, longest, room // 3) for room in setting.rooms])
    return step


def texts_of(setting: Setting, number: int, vocab_size: int) -> list[Texts]:
    """The batches of step `number`: their buckets, lengths, tokens, and how many labels they have differ."""
    draw = torch.Generator().manual_seed(number)
    found = []
    for i, bucket in enumerate(BUCKETS_OF_STEPS[number % len(BUCKETS_OF_STEPS)]):
        share, labelled = torch.rand(2, generator=draw).tolist()
        lower = setting.rooms[bucket - 1] if bucket else setting.rooms[0] // 2
        total = int(lower + 2 + share * (setting.rooms[bucket] - lower - 2))  # two more than the smaller bucket holds
        lengths = list[int]()
        while (left := total - sum(lengths)) > 0:
            at = int(torch.randint(len(setting.lengths), (), generator=draw))
            lengths.append(min(left, setting.lengths[at]))
        lengths.sort(reverse=True)  # `draw` shuffles them
        found.append(Texts.draw(lengths, vocab_size, 1000 * number + i, 0.1 + 0.1 * labelled))
    return found


def set_rates(optimizer: torch.optim.Optimizer, number: int) -> None:
    """Rates that no other step has."""
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = 1e-4 / (1 + number / 10) if i == 0 else 2e-5 * (1 + number % 3)


def run_step(step: GraphedStep, setting: Setting, number: int) -> None:
    texts = texts_of(setting, number, step.model.config.vocab_size)
    set_rates(step.optimizer, number)
    step([each.packed() for each in texts], [float(sum(each.num_labels for each in texts))], seed=7 + 13 * number)
    assert step.why_eager is None, f"step {number} ran op by op: {step.why_eager}"


def kept(step: GraphedStep) -> Tensors:
    """All that a step leaves behind."""
    found: Tensors = {}
    for name, p in step.model.named_parameters():
        found[name] = p.detach()
        found |= {f"{moment} of {name}": step.optimizer.state[p][moment] for moment in ("exp_avg", "exp_avg_sq")}
    return found


def difference(one: Tensors, other: Tensors) -> str | None:
    """Which tensors differ, and by how much the first does."""
    differing = [name for name in one if not torch.equal(one[name], other[name])]
    if not differing:
        return None
    a, b = one[differing[0]], other[differing[0]]
    others = f", and {len(differing) - 1} others" if len(differing) > 1 else ""
    return f"{differing[0]}: {int((a != b).sum())} of {a.numel()} by up to {float((a - b).abs().max()):.3g}{others}"


def first_difference(one: GraphedStep, other: GraphedStep, setting: Setting, steps: int) -> str:
    """The step in which two that begin alike part, looked for after every one of them."""
    for number in range(steps):
        for step in (one, other):
            run_step(step, setting, number)
        losses = one.losses(), other.losses()
        found = difference(kept(one), kept(other))
        if losses[0] != losses[1]:
            return f"step {number}: losses {losses[0]} and {losses[1]}; {found or 'no tensor'}"
        if found is not None:
            return f"step {number}: {found}"
    return "no step where each is waited for"


def compare(setting: Setting, steps: int, made: tuple[Callable[[], Graphs], Callable[[], Graphs]]) -> list[float]:
    """Run two that are to give the same bits, each without a wait in between; their losses. Raises AssertionError."""
    pair = [make_step(setting, make()) for make in made]
    losses = []
    for step in pair:
        for number in range(steps):
            run_step(step, setting, number)
        losses.append(step.losses())
    parted = next((i for i in range(steps) if losses[0][i] != losses[1][i]), None)
    found = difference(kept(pair[0]), kept(pair[1]))
    if parted is not None or found is not None:
        pair = [make_step(setting, make()) for make in made]
        where = first_difference(pair[0], pair[1], setting, steps)
        first = "all losses are the same" if parted is None else f"the loss of step {parted} is another"
        raise AssertionError(f"{first}; at the end {found or 'no tensor differs'}; with waits: {where}")
    assert all(map(math.isfinite, losses[0])) and len(set(losses[0])) == steps, f"losses are {losses[0]}"
    return losses[0]


def check_capture(setting: Setting, make_graphs: Callable[[torch.device], Graphs] = graphs_on) -> dict[str, Any]:
    """An entry: batches, lengths, numbers of labels, rates, seeds and step numbers change in each step."""
    steps = SMOKE_STEPS if setting.smoke else STEPS
    try:
        compare(setting, steps, (NoGraphs, NoGraphs))
    except AssertionError as error:
        raise AssertionError(f"two runs without graphs: {error}") from None
    made: list[CountedGraphs] = []

    def graphs() -> CountedGraphs:
        made.append(CountedGraphs(make_graphs(setting.device)))
        return made[-1]

    losses = compare(setting, steps, (graphs, NoGraphs))
    parts = [which for number in range(steps) for which in BUCKETS_OF_STEPS[number % len(BUCKETS_OF_STEPS)]]
    counts = made[0].captures, made[0].replays
    captures = len(set(parts)) + 1  # the optimizer's, too
    assert counts == (captures, len(parts) + steps - captures), f"(captures, replays) are {counts}"
    numbers = {"captures": counts[0], "replays": counts[1], "bytes": made[0].nbytes()}
    return {"steps": steps, "batches": len(parts), "first loss": losses[0], "last loss": losses[-1], **numbers}


# --------------------------------------------------------------------------------------------------------------------
# A plain loop


def loop(start: nn.Module, setting: Setting, steps: int, dtype: torch.dtype) -> Tensors:
    """What torch's own optimizer makes of a model: losses and weights. Float32: products in bfloat16 by autocast."""
    model = copy.deepcopy(start).to(dtype)
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-4), betas=BETAS, eps=LOOP_EPS)
    losses = []
    for number in range(steps):
        texts = texts_of(setting, number, model.config.vocab_size)
        total = float(sum(each.num_labels for each in texts))
        set_rates(optimizer, number)

        def loss_of(batch: PackedInputs, total: float = total) -> torch.Tensor:
            with torch.autocast(setting.device.type, torch.bfloat16, enabled=dtype is torch.float32):
                return mean_loss(model, batch, total)

        losses.append(plain_step(loss_of, optimizer, [each.packed().to(setting.device) for each in texts]))
    return {"losses": torch.stack(losses), **weights_of(model)}


def weights_of(model: nn.Module) -> Tensors:
    """By name; those of query, key and value in one tensor: gradients of a key's bias are 0 but for rounding."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, p in model.named_parameters():
        found.setdefault(re.sub(r"\.(query|key|value)\.", ".qkv.", name), []).append(p.detach())
    return {name: torch.cat(parts) for name, parts in found.items()}


def check_loop(setting: Setting) -> dict[str, Any]:
    """An entry: captured steps, and a loop op by op, by the error rule. Without dropout, whose masks differ."""
    steps = SMOKE_LOOP_STEPS if setting.smoke else LOOP_STEPS
    step = make_step(setting, graphs_on(setting.device), LOOP_EPS, **NO_DROPOUT)
    start = copy.deepcopy(step.model)
    with use_backend("torch"):
        oracle, baseline = (loop(start, setting, steps, dtype) for dtype in (torch.float64, torch.float32))
    with op_by_op():
        ours = {"op by op": loop(start, setting, steps, torch.float32)}
    for number in range(steps):
        run_step(step, setting, number)
    losses = torch.tensor(step.losses(), device=setting.device)
    ours["graphs"] = {"losses": losses, **weights_of(step.model)}
    for way, found in ours.items():
        for name, exact in oracle.items():
            assert_close_to_reference(found[name], exact, baseline[name], GRADIENT_FACTOR, f"{way}: {name}")
    return {"steps": steps, "tensors": len(oracle), "losses": {way: f["losses"].tolist() for way, f in ours.items()}}


CHECKS: dict[str, Callable[[Setting], dict[str, Any]]] = {"capture": check_capture, "loop": check_loop}


def main() -> None:
    try:
        found = CHECKS[sys.argv[1]](Setting(torch.device("cuda"), smoke=False))
    except failures_of_a_kernel() as error:
        found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
    say_result(found)


if __name__ == "__main__":
    main()
