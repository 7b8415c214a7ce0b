"""Results that are few, or far apart in size, are judged over several draws of their operands together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from seeds import another_draw

from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

Tensors = dict[str, torch.Tensor]
Results = tuple[Tensors, Tensors, Tensors]  # by name: what is judged, in float64, and in its own dtype


def judge(results_of: Callable[[int], Results], rule: Callable[[Results], None], draws: int) -> None:
    """Asserts `rule` of results_of(0), and where it does not hold, of the results of all draws together.

    The error rule takes the formula's largest error for what rounding does to results of this size. Of a few elements
    that is luck, of several draws together it is not; and what is wrong stays the largest error.
    """
    first = results_of(0)
    try:
        rule(first)
    except AssertionError:
        all_of_them = [first, *(results_of(draw) for draw in range(1, draws))]
        names = first[0].keys()
        actual, oracle, baseline = (
            {name: torch.cat([each[i][name].flatten() for each in all_of_them]) for name in names} for i in range(3)
        )
        rule((actual, oracle, baseline))


def judge_losses(curves_of: Callable[[], Sequence[Sequence[float]]], draws: int = 8) -> None:
    """The error rule of a few losses: `curves_of()` trains three models, whose losses it gives: ours, theirs in ours'
    precision, and theirs in float64. Its numbers are drawn by seeds.py.
    """

    def results_of(draw: int) -> Results:
        with another_draw(draw):
            actual, baseline, oracle = curves_of()
        assert len(actual) == len(baseline) == len(oracle) > 0
        exact = torch.tensor(oracle, dtype=torch.float64)
        return {"": torch.tensor(actual)}, {"": exact}, {"": torch.tensor(baseline)}

    judge(results_of, lambda results: assert_close_to_reference(*(t[""] for t in results), GRADIENT_FACTOR), draws)


def nudged(t: torch.Tensor, draw: int) -> torch.Tensor:
    """Each number about a unit in the last place up or down, or not at all; draw 0 leaves all as they are.

    Where a few numbers decide how far all of a result is off, two saturated scores or the norm of one row, one draw is
    luck, however many elements it has. All such luck comes up in draws of the same operands, nudged: so they are judged
    together, for the kernels as for the formula.
    """
    if draw == 0:
        return t
    steps = torch.randint(-1, 2, t.shape, generator=torch.Generator().manual_seed(draw))
    return (t.double() * (1 + torch.finfo(t.dtype).eps * steps)).to(t.dtype)
