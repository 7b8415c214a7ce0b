"""An optimizer's state in buffers that stay where they are: what a captured step of AdamW writes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from fastbert import ops
from fastbert.training.optimizers import ONE_PASS

_MOMENTS = ("exp_avg", "exp_avg_sq")
_GRAD = attrgetter("grad")


def optimizer_unsupported(optimizer: Any, model: nn.Module) -> str | None:
    """Why no step of this optimizer over this model can be captured."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return f"the optimizer is a {type(optimizer).__name__}, and AdamW is the one whose steps can be captured"
    first, *others = optimizer.param_groups
    if any(group["betas"] != first["betas"] or group["eps"] != first["eps"] for group in others):
        return "the optimizer's groups differ in betas or eps"
    for name, value in ONE_PASS.items():
        if name != "capturable" and any(group[name] != value for group in optimizer.param_groups):
            return f"the optimizer has {name}={not value}"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has hooks"
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    known, device = set(map(id, weights)), weights[0].device
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in known:
            return f"{name} takes a gradient, and no group of the optimizer has it"
        if id(p) in known and (type(p) is not nn.Parameter or p.dtype is not torch.float32 or p.device != device):
            return f"{name} is a {type(p).__name__} of {p.dtype} on {p.device}, and not float32 on {device}"
        if not p.is_contiguous():
            return f"{name} is not contiguous"
        if p._backward_hooks or p._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            return f"the gradient of {name} has a hook"
    if not all(p.requires_grad for p in weights):
        return "a weight of the optimizer takes no gradient"
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

    def __init__(self, optimizer: Any, max_norm: float, num_totals: int):
        self.optimizer, self.max_norm = optimizer, max_norm
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
        self._held: tuple[Any, Any] | None = None
        self.adopt()

    def is_current(self) -> bool:
        """Whether the optimizer has this state and these groups: nothing has been loaded."""
        held = self._held
        return held is not None and held[0] is self.optimizer.state and held[1] is self.optimizer.param_groups

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
        self._held = state, self.optimizer.param_groups

    def take_gradients(self) -> None:
        """Add what somebody's backward has left at the weights, which have no gradients then."""
        if any(grad is not None for grad in map(_GRAD, self.weights)):
            self.add([p.grad for p in self.weights])
            for p in self.weights:
                p.grad = None

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Of the weights; None: one has none. This is captured."""
        found = [(mine, given) for mine, given in zip(self.gradients, gradients, strict=True) if given is not None]
        torch._foreach_add_([mine for mine, _ in found], [given for _, given in found])

    def begin(self, totals: list[float]) -> None:
        """Write what the next step goes by, from the options that the groups have now."""
        groups = self.optimizer.param_groups
        self.step_number += 1
        rates = [float(group["lr"]) for group in groups]
        decays = [group["weight_decay"] for group in groups]
        numbers = ops.step_numbers(self.step_number, rates, decays, *map(float, groups[0]["betas"]))
        pins = self._numbers.is_cuda
        self._numbers.copy_(torch.tensor([*numbers, *totals], pin_memory=pins), non_blocking=True)

    def step(self) -> None:
        """AdamW by the gradients there are, which are 0 behind it. This is what is captured."""
        self._step(self.state, self.numbers)

    def step_other(self) -> None:
        """The same of a weight that nobody has: it compiles what `step` launches, and leaves the weights alone."""
        other = ops.FlatState([torch.zeros(8, device=self.weights[0].device)], [0])
        self._step(other, torch.zeros(4, device=other.gradients.device))

    def count_step(self) -> None:
        """Behind each step, captured or not."""
        self.steps.add_(1)

    def _step(self, state: ops.FlatState, numbers: torch.Tensor) -> None:
        first = self.optimizer.param_groups[0]
        beta1, beta2 = map(float, first["betas"])
        ops.adamw_flat(state, numbers, beta1=beta1, beta2=beta2, eps=float(first["eps"]), max_norm=self.max_norm)
