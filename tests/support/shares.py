"""Whether random marks come up as often as they should, by a bound that holds for any seed."""

from __future__ import annotations

import math

import torch

CHANCE = 1e-9  # of a false alarm, for all the means of one call together


def assert_share(marks: torch.Tensor, share: float, *axes: tuple[int, ...]) -> None:
    """The mean of independent marks, and their means over each of `axes`, are those of draws with chance `share`.

    By Hoeffding's bound (1963, theorem 1), which holds for few draws and in the tails too, where a number of standard
    deviations does not: a mean of n draws is q or beyond with a chance of exp(-n KL(q, share)) at most, on either side.
    """
    marks = marks.double()
    for over in (tuple(range(marks.dim())), *axes):
        means = marks.mean(over)
        draws = marks.numel() // means.numel()
        distance = torch.xlogy(means, means / share) + torch.xlogy(1 - means, (1 - means) / (1 - share))
        worst = (draws * distance).max().item()
        assert worst < math.log(2 * means.numel() * (1 + len(axes)) / CHANCE), (
            f"means of {draws} draws over axes {over} go from {means.min():.4f} to {means.max():.4f}, not {share}"
        )
