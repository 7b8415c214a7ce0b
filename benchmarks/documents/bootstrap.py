"""How sure a figure is: percentile intervals of 95 % from 10,000 bootstrap samples (Efron 1979).

What is drawn again are groups: all queries of a chapter, all questions on an article, all entities of a document come
or stay away together, as they are alike. A figure is a ratio of two sums over groups: a mean is the sum of values over
their number, and F1 is 2 TP over what was said and what there is. All ways of doing a thing get the same samples, so
that their differences are paired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

DRAWS, SEED, INTERVAL = 10_000, 0, (2.5, 97.5)
Sums = tuple[np.ndarray, np.ndarray]  # what is above and below the line, (groups,) each


def means(values: np.ndarray, groups: np.ndarray) -> Sums:
    """Of a value for each item."""
    return np.bincount(groups, weights=values), np.bincount(groups).astype(np.float64)


def compare(ways: Mapping[str, Sums], baseline: str) -> dict[str, dict[str, Any]]:
    """Of each way its `value` in per cent and its `interval`; but for the baseline also the `difference` to that."""
    groups = len(ways[baseline][0])
    draws = np.random.default_rng(SEED).multinomial(groups, np.full(groups, 1 / groups), size=DRAWS).astype(np.float64)
    drawn = {name: 100 * (draws @ above) / (draws @ below) for name, (above, below) in ways.items()}
    values = {name: 100 * float(above.sum() / below.sum()) for name, (above, below) in ways.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        found[name] = {"value": value, "interval": np.percentile(drawn[name], INTERVAL).tolist()}
        if name != baseline:
            apart = np.percentile(drawn[name] - drawn[baseline], INTERVAL).tolist()
            found[name] |= {"difference": value - values[baseline], "interval of difference": apart}
    return found


def table(metrics: Mapping[str, Mapping[str, Mapping[str, Any]]], baseline: str, only: Sequence[str] = ()) -> list[str]:
    """Markdown: a row for each way (or for `only` these), and two columns for each metric, as `compare` gives them."""
    lines = ["| | " + " | ".join(f"{name} | beside {baseline}" for name in metrics) + " |"]
    lines.append("|---|" + "--:|--:|" * len(metrics))
    for way in only or list(next(iter(metrics.values()))):
        cells = [cell for found in metrics.values() for cell in _cells(found[way])]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return lines


def _cells(found: Mapping[str, Any]) -> tuple[str, str]:
    low, high = found["interval"]
    value = f"{found['value']:.1f} ({low:.1f} to {high:.1f})"
    if "difference" not in found:
        return value, ""
    low, high = found["interval of difference"]
    size = "no difference" if low <= 0 <= high else f"{found['difference']:+.1f}"
    return value, f"{size} ({low:+.1f} to {high:+.1f})"
