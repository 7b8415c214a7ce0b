"""Which cases of a test `make test` leaves to `make test-full`: those that take a path which others take, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def thinned(of: int) -> pytest.MarkDecorator:
    """A mark for a grid: `make test` has the cases of one of `of` colours of a checkerboard laid over its axes. So each
    value of an axis meets one of `of` values of each other axis, and `make test-full` has the other colours' cases.
    """
    return pytest.mark.thinned(of)


halved = thinned(2)

_Places = dict[tuple[str, ...], dict[tuple[int, ...], int]]  # by an axis' names and a value's parts: which value it is


def left_to_full(where: Callable[[dict[str, Any]], bool]) -> pytest.MarkDecorator:
    """A mark: the cases for whose parameters `where` holds are also marked `full` (conftest.py does it)."""
    return pytest.mark.left_to_full.with_args(where)  # a call with a function alone would decorate it


# Of what Triton's interpreter runs `make test` has a case of each kernel: in tests/ops/test_contract.py, most of them.
triton_left_to_full = left_to_full(lambda given: given["backend"] == "triton")


def mark_those_left_to_full(items: list[pytest.Item]) -> None:
    places: dict[str, _Places] = {}
    for item in items:
        left = any(mark.args[0](item.callspec.params) for mark in item.iter_markers("left_to_full"))
        if (mark := item.get_closest_marker("thinned")) is not None:
            left |= _colour(item, places.setdefault(item.nodeid.partition("[")[0], {})) % mark.args[0] != 0
        if left:
            item.add_marker(pytest.mark.full)


def _colour(item: pytest.Item, places: _Places) -> int:
    """The sum of its values' places on their axes; names given together are one axis."""
    given = item.callspec.params
    axes = [_names(mark.args[0]) for mark in item.iter_markers("parametrize")]
    axes += [(name,) for name in given if not any(name in axis for axis in axes)]  # of a fixture
    total = 0
    for axis in axes:
        known = places.setdefault(axis, {})
        total += known.setdefault(tuple(id(given[name]) for name in axis), len(known))  # all cases have the same values
    return total


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(name.strip() for name in given.split(",")) if isinstance(given, str) else tuple(given)
