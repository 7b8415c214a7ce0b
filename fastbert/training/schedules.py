"""Learning rates over the steps of a run, as multiples of each group's own."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer

from fastbert.errors import ConfigError

SCHEDULES = ("linear", "cosine", "trapezoid", "constant")
TRAPEZOID_END = 0.2  # the share of a run in which a trapezoid goes down (Hägele et al. 2024, section 3)


class Schedule:
    """Sets the learning rates of an optimizer's groups for a step, counted from 0. It keeps no state.

    `warmup` steps up from 0, then, by the name, down to 0 at `steps`, or not. Raises ConfigError.
    """

    def __init__(self, optimizer: Optimizer, name: str, steps: int, warmup: int):
        self.optimizer, self.multiplier = optimizer, multiplier(name, steps, warmup)
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def set(self, step: int) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.multiplier(step)


def multiplier(name: str, steps: int, warmup: int) -> Callable[[int], float]:
    """The function from a step, counted from 0, to the multiple of the learning rate."""
    if name not in SCHEDULES:
        raise ConfigError(f"unknown schedule {name!r}; there are {', '.join(SCHEDULES)}")
    if not 0 <= warmup <= steps:
        raise ConfigError(f"warmup is {warmup} steps of {steps}; it must be between 0 and all of them")

    def at(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        left = max(0.0, (steps - step) / max(1, steps - warmup))  # 1 after the warm-up, 0 at the end
        if name == "linear":
            return left
        if name == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))
        if name == "trapezoid":
            return min(1.0, (steps - step) / max(1.0, TRAPEZOID_END * steps)) if step < steps else 0.0
        return 1.0

    return at
