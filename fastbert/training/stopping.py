"""SIGINT and SIGTERM in a run: the step is finished and saved first, as users of preemptible machines expect."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastbert.native.signals import set_handler

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_S = 3.0  # batch systems signal torchrun and its ranks, and torchrun its ranks once more


@contextmanager
def signals_wait() -> Iterator[list[int]]:
    """Signals that came are in the list; one that comes again, after some seconds, does what it did before."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    first = [0.0]

    def note(number: int, frame: Any) -> None:
        if not received:
            first[0] = time.monotonic()
        elif time.monotonic() - first[0] > AGAIN_S:
            set_handler(number, before[number])
            signal.raise_signal(number)
            return
        received.append(number)

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for restored, handler in before.items():
            set_handler(restored, handler)


def leave_by(number: int) -> None:
    """End as the signal would have ended this process. Raises KeyboardInterrupt, if nothing else is raised."""
    signal.raise_signal(number)
    raise KeyboardInterrupt
