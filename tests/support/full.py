"""Which cases of a test `make test` leaves to `make test-full`: those that take a path which others take, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def left_to_full(where: Callable[[dict[str, Any]], bool]) -> pytest.MarkDecorator:
    """A mark: the cases for whose parameters `where` holds are also marked `full` (conftest.py does it)."""
    return pytest.mark.left_to_full.with_args(where)  # a call with a function alone would decorate it


def mark_those_left_to_full(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("left_to_full"):
            if mark.args[0](item.callspec.params):
                item.add_marker(pytest.mark.full)
