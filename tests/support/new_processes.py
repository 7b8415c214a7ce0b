"""Processes that a test starts, and has to end."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess


def since_now() -> Callable[[], set[BaseProcess]]:
    """A function that gives those which are there and were not yet: a failed call's frames may hold some."""
    before = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - before
