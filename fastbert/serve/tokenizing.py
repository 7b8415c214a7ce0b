"""Tokenising for many clients at once: the event loop goes on, and memory has a bound that does not grow with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import anyio

from fastbert.native.memory import give_back

INLINE = 2000  # characters, or ids; to tokenise more would hold up the other requests: a thread does it
LARGE = 1 << 17  # more may take a hundred times their memory: one request after the other
MIDDLE_THREADS = 4  # for what is between; a text takes all cores by itself, so more would gain nothing

Made = TypeVar("Made")


class Tokenizing:
    """Runs what tokenises, in threads of its own, and gives memory back. Results have other threads."""

    def __init__(self) -> None:
        self._middle, self._large = _Threads(MIDDLE_THREADS), _Threads(1)

    async def run(self, make: Callable[[], Made], inputs: Sequence[Any], timeout_s: float) -> tuple[Made, float]:
        """(what `make()` gives, which tokenises the inputs, the seconds that it took). Raises TimeoutError: it waited
        too long.
        """
        size = sum(sum(map(len, one)) if isinstance(one, tuple) else len(one) for one in inputs)
        if size <= INLINE:
            return _timed(make)
        # Not by the time that it took: all memory that computing is about to use again would be given back, too.
        threads, run = (self._large, _giving_back) if size > LARGE else (self._middle, _timed)
        with anyio.fail_after(timeout_s):
            return await threads.run(partial(run, make))


class _Threads:
    """Threads that are given no more work than they do. What waits for one waits here, and leaves nothing behind when
    its client has gone: the queue of an executor would keep its texts.
    """

    def __init__(self, count: int):
        self._executor, self._free = ThreadPoolExecutor(count), asyncio.Semaphore(count)

    async def run(self, work: Callable[[], Made]) -> Made:
        await self._free.acquire()
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        running.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(running)  # its thread goes on when the client has gone


def _timed(make: Callable[[], Made]) -> tuple[Made, float]:
    start = time.perf_counter()
    result = make()
    return result, time.perf_counter() - start


def _giving_back(make: Callable[[], Made]) -> tuple[Made, float]:
    try:
        return _timed(make)
    finally:
        give_back()
