"""What no engine can be faster than with one text: its weights are read once, and its operations are done."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastbert.bench.timing import measure_once

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # a weight of the layers


def readers(size: int) -> list[Callable[[], object]]:
    """Ways of reading `size` bytes once with torch's threads; which is fastest depends on where the bytes lie."""
    memory = torch.ones(-(-size // 64) * 8, dtype=torch.float64)  # whole cache lines
    return [memory.sum, memory.view(torch.float32).sum, memory.view(torch.int32).amax, memory.view(torch.int8).amax]


def read_seconds(ways: list[Callable[[], object]], min_seconds: float) -> float:
    """A read by the fastest of the ways, over as many as fill `min_seconds` each.

    One read follows the other: what fits into a cache stays there, as weights do where nothing else runs.
    """
    return min(measure_once(way, min_seconds) for way in ways)
