"""AdamW's state in buffers that stay where they are: what a GPU's step goes by, captured or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fastbert import ops

# What of a group's options fastbert.ops computes in one pass over all weights. With other values a step is torch's own.
ONE_PASS = {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": True}
_MOMENTS = ("exp_avg", "exp_avg_sq")
_GRAD = attrgetter("grad")


def groups_unsupported(optimizer: torch.optim.AdamW) -> str | None:
    """Why no pass over all weights of this optimizer computes its step, by the options of its groups."""
    first, *others = optimizer.param_groups
    if any(group["betas"] != first["betas"] or group["eps"] != first["eps"] for group in others):
        return "the optimizer's groups differ in betas or eps"
    for name, value in ONE_PASS.items():
        if any(group[name] != value for group in optimizer.param_groups):
            return f"the optimizer has {name}={not value}"
    return None


def optimizer_unsupported(
    optimizer: Any, names: Mapping[Any, str] = MappingProxyType({}), counts_steps: bool = True
) -> str | None:
    """Why no step of this optimizer can go over flat buffers. names: of weights, for the reason. counts_steps: whether
    the weights' numbers of steps are compared, each of which is a wait for a GPU.
    """
    if not isinstance(optimizer, torch.optim.AdamW):
        return f"the optimizer is a {type(optimizer).__name__}, and AdamW is the one whose steps can be captured"
    reason = groups_unsupported(optimizer)
    if reason is not None:
        return reason
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or _global_optimizer_pre_hooks:
        return "the optimizer has hooks"
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    device = weights[0].device
    for p in weights:
        if type(p) is not nn.Parameter or p.dtype is not torch.float32 or p.device != device:
            name = names.get(p, "a weight")
            return f"{name} is a {type(p).__name__} of {p.dtype} on {p.device}, and not float32 on {device}"
        if not p.is_contiguous():
            return f"{names.get(p, 'a weight')} is not contiguous"
        if not p.requires_grad:
            return "a weight of the optimizer takes no gradient"
    if not counts_steps:
        return None
    counts = {float(optimizer.state[p]["step"]) if optimizer.state.get(p) else 0.0 for p in weights}
    return "the weights have taken different numbers of steps" if len(counts) > 1 else None


def _groups_of(optimizer: Any) -> list[int]:
    """The group of each weight."""
    return [i for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]


class FlatOptimizer:
    """The gradients and moments of an AdamW's weights, and the numbers that its next step goes by.

    The optimizer goes on to have its state: `exp_avg`, `exp_avg_sq` and `step` of each weight are parts of the buffers
    here, so `state_dict()` is what it always is. What the optimizer had before, or has loaded since, is copied in by
    `adopt`. `totals`: numbers that the loss is divided by, on the device, float32 (num_totals,).
    """

    def __init__(self, optimizer: Any, num_totals: int = 0):
        self.optimizer = optimizer
        self.weights = [p for group in optimizer.param_groups for p in group["params"]]
        self._of = _groups_of(optimizer)
        self.state = ops.FlatState([p.detach() for p in self.weights], self._of)
        device, first = self.weights[0].device, optimizer.param_groups[0]
        self.gradients = self.state.views(self.state.gradients)
        # Where torch's own step would look for them.
        on_device = bool(first["fused"] or first["capturable"])
        self.steps = torch.zeros(len(self.weights), device=device if on_device else "cpu")
        self._numbers = torch.zeros(2 + 2 * self.state.num_groups + num_totals, device=device)
        self.numbers, self.totals = self._numbers.split([2 + 2 * self.state.num_groups, num_totals])
        self.step_number = 0
        self._held: tuple[Any, ...] = ()
        self.adopt()

    def is_current(self) -> bool:
        """Whether the optimizer has this state and these groups: nothing has been loaded."""
        state = self.optimizer.state
        now = state, self.optimizer.param_groups, state.get(self.weights[0]), state.get(self.weights[-1])
        return len(self._held) == len(now) and all(map(is_, self._held, now))

    def is_of(self, optimizer: Any) -> bool:
        """Whether the weights, and the groups that they are in, are those of the optimizer, and lie where they did."""
        now = [p for group in optimizer.param_groups for p in group["params"]]
        same = len(now) == len(self.weights) and all(map(is_, now, self.weights))
        return same and _groups_of(optimizer) == self._of and self.state.is_of(now)

    def adopt(self) -> None:
        """Copy what the optimizer has of moments and steps in, and give it the buffers instead."""
        state, buffers = self.optimizer.state, (self.state.means, self.state.squares)
        views = [self.state.views(buffer) for buffer in buffers]
        for i, p in enumerate(self.weights):
            old = state.get(p) or {}
            for name, view in zip(_MOMENTS, (views[0][i], views[1][i]), strict=True):
                if name not in old:
                    view.zero_()
                elif old[name].data_ptr() != view.data_ptr():
                    view.copy_(old[name])
            if i == 0:
                self.step_number = int(old.get("step", 0))
            state[p] = {"step": self.steps[i], "exp_avg": views[0][i], "exp_avg_sq": views[1][i]}
        self.steps.fill_(self.step_number)
        self._held = state, self.optimizer.param_groups, state[self.weights[0]], state[self.weights[-1]]

    def take_gradients(self) -> None:
        """Add what somebody's backward has left at the weights, which have no gradients then."""
        if any(grad is not None for grad in map(_GRAD, self.weights)):
            self.add([p.grad for p in self.weights])
            for p in self.weights:
                p.grad = None

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Of the weights; None: one has none. This is captured."""
        pairs = [
            (mine, gradient) for mine, gradient in zip(self.gradients, gradients, strict=True) if gradient is not None
        ]
        torch._foreach_add_([mine for mine, _ in pairs], [gradient for _, gradient in pairs])

    def begin(self, totals: list[float]) -> None:
        """Write what the next step goes by, from the options that the groups have now."""
        groups = self.optimizer.param_groups
        self.step_number += 1
        rates = [float(group["lr"]) for group in groups]
        decays = [group["weight_decay"] for group in groups]
        numbers = ops.step_numbers(self.step_number, rates, decays, *map(float, groups[0]["betas"]))
        pins = self._numbers.is_cuda
        self._numbers.copy_(torch.tensor([*numbers, *totals], pin_memory=pins), non_blocking=True)

    def step(self, max_norm: float) -> torch.Tensor:
        """AdamW by the gradients there are, which are 0 behind it; their norm. This is what is captured."""
        return self._step(self.state, self.numbers, max_norm)

    def step_other(self, max_norm: float) -> None:
        """The same of a weight of its own: it compiles what `step` launches, and leaves the weights alone."""
        other = ops.FlatState([torch.zeros(8, device=self.weights[0].device)], [0])
        self._step(other, torch.zeros(4, device=other.gradients.device), max_norm)

    def count_step(self) -> None:
        """Behind each step, captured or not."""
        self.steps.add_(1)

    def _step(self, state: ops.FlatState, numbers: torch.Tensor, max_norm: float) -> torch.Tensor:
        first = self.optimizer.param_groups[0]
        beta1, beta2 = map(float, first["betas"])
        return ops.adamw_flat(state, numbers, beta1=beta1, beta2=beta2, eps=float(first["eps"]), max_norm=max_norm)
