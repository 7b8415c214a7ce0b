"""Tokenising for many clients at once: the event loop goes on, and memory has a bound that does not grow with them."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

INLINE = 2000  # characters, or ids; to tokenise more would hold up the other requests: a thread does it
LARGE = 1 << 17  # more may take a hundred times their memory: one request after the other

Made = TypeVar("Made")


class Tokenizing:
    """Runs what tokenises, in threads, and gives memory back."""

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(1)  # a long text takes all cores by itself

    async def run(self, make: Callable[[], Made], inputs: Sequence[Any], timeout_s: float) -> tuple[Made, float]:
        """(what `make()` gives, which tokenises the inputs, the seconds that it took). Raises TimeoutError: it waited
        too long.
        """
        size = sum(sum(map(len, one)) if isinstance(one, tuple) else len(one) for one in inputs)
        if size <= INLINE:
            return _timed(make)
        run, executor = (_giving_back, self._large) if size > LARGE else (_timed, None)
        running = asyncio.get_running_loop().run_in_executor(executor, run, make)
        try:
            return await asyncio.wait_for(running, timeout_s)
        except asyncio.TimeoutError:  # which is not TimeoutError in Python 3.10
            raise TimeoutError from None


def _timed(make: Callable[[], Made]) -> tuple[Made, float]:
    start = time.perf_counter()
    made = make()
    return made, time.perf_counter() - start


def _giving_back(make: Callable[[], Made]) -> tuple[Made, float]:
    try:
        return _timed(make)
    finally:
        if _trim is not None:
            _trim(0)


# glibc keeps what was freed for the thread that had it, and of a tokenizer's many threads each has its own.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
