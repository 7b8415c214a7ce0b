"""Operands that lie in memory in other ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference


def assert_same_results(backend: str, run: Callable[..., tuple[torch.Tensor, ...]], layouts: Sequence[Any]) -> None:
    """run(layout, dtype) for operands that lie in other ways: the same bits. torch's own products, which sum in another
    order where strides are others, keep to the error rule.
    """
    first, *others = (run(layout) for layout in layouts)
    exact = run(layouts[0], torch.float64) if backend == "torch" else first
    for other in others:
        for found, expected, oracle in zip(other, first, exact, strict=True):
            if backend == "torch":
                assert_close_to_reference(found, oracle, expected, GRADIENT_FACTOR)
            else:
                assert torch.equal(found, expected)
