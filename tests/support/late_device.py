"""A device with a stream for copies and one for steps, simulated: it runs things as late, or as early, as events allow.

A GPU runs what two streams hold in any order that the events between them allow, and shows a missing event once in a
thousand steps. Here the order is chosen, the worst ones among them, and each run of a test is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from seeds import python_random

from fastbert.packed_inputs import PackedInputs


class Event:
    def __init__(self) -> None:
        self.has_happened = False


class _Waits:
    """In a stream: what stands behind it waits for the event."""

    def __init__(self, event: Event):
        self.event = event


class _Runs:
    """In a stream: something to do, and the event that it is done."""

    def __init__(self, do: Callable[[], None]):
        self.do, self.event = do, Event()


class SimulatedLane:
    """A `fastbert.training.graphed.lanes.Lane`. `launch` launches a step, `finish` lets the device come to its end.

    order: what the device does as soon as the host has launched something. "at once": all that it may; "late": nothing,
    until the host pauses; "copies first": copies, as soon as events allow, and steps when the host pauses; "steps
    first": steps, and copies only that they wait for; a number: one of both streams, drawn by this seed; "n behind":
    steps and their copies, but for the last n steps that were launched.

    pauses: how often the host had to. `wrong`: what must not happen.
    """

    def __init__(self, order: str | int, lock_error: str | None = None):
        self.order, self.lock_error = order, lock_error
        self.pauses, self.copies_done, self.wrong = 0, 0, list[str]()
        self.locked: torch.Tensor | None = None
        self.was_locked = False
        self._copies, self._steps = deque[_Waits | _Runs](), deque[_Waits | _Runs]()
        self._draw = python_random(order) if isinstance(order, int) else None

    # The Lane

    def lock(self, memory: torch.Tensor) -> str | None:
        if self.lock_error is None:
            self.locked, self.was_locked = memory, True
        return self.lock_error

    def unlock(self, memory: torch.Tensor) -> None:
        if self.locked is not memory:
            self.wrong.append("unlocked what was not locked")
        if any(isinstance(item, _Runs) for item in self._copies):
            self.wrong.append("unlocked while copies were under way")
        self.locked = None

    def pinned(self, packed: PackedInputs) -> PackedInputs:
        return packed

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        def do() -> None:
            target.copy_(source)
            self.copies_done += 1

        return self._launched(self._copies, do)

    def record(self) -> Event:
        return self._launched(self._steps, lambda: None)

    def copies_wait(self, event: Event) -> None:
        self._copies.append(_Waits(event))

    def steps_wait(self, event: Event) -> None:
        self._steps.append(_Waits(event))

    def is_done(self, event: Event) -> bool:
        return event.has_happened

    def pause(self) -> None:
        self.pauses += 1
        assert self._run_one(self._steps) or self._run_one(self._copies), "the host waits for what never comes"
        self._go_on()

    # The device

    def launch(self, step: Callable[[], None]) -> None:
        self._launched(self._steps, step)

    def finish(self) -> None:
        while self._run_one(self._steps) or self._run_one(self._copies):
            pass
        assert not self._steps and not self._copies, "the streams wait for each other"

    def _launched(self, stream: deque[_Waits | _Runs], do: Callable[[], None]) -> Event:
        item = _Runs(do)
        stream.append(item)
        self._go_on()
        return item.event

    def _go_on(self) -> None:
        if self.order == "at once":
            while self._run_one(self._steps) or self._run_one(self._copies):
                pass
        elif self.order == "copies first":
            while self._run_one(self._copies):
                pass
        elif self.order == "steps first":
            self._run_steps(0)
        elif isinstance(self.order, str) and self.order.endswith("behind"):
            self._run_steps(2 * int(self.order.split()[0]))  # a step, and the event behind it
        elif self._draw is not None:
            for _ in range(self._draw.randrange(4)):
                self._run_one(self._draw.choice([self._steps, self._copies]))

    def _run_steps(self, left: int) -> None:
        """All but the last so many, with the copies that they wait for."""
        while sum(isinstance(item, _Runs) for item in self._steps) > left:
            if not (self._run_one(self._steps) or self._run_one(self._copies)):
                return

    def _run_one(self, stream: deque[_Waits | _Runs]) -> bool:
        """What stands first in a stream, if events allow it."""
        while stream and isinstance(first := stream[0], _Waits) and first.event.has_happened:
            stream.popleft()
        if not stream or isinstance(first := stream[0], _Waits):
            return False
        stream.popleft()
        assert isinstance(first, _Runs)
        first.do()
        first.event.has_happened = True
        return True


class StepsDoNotWait(SimulatedLane):
    """The fault: a step begins before its batch is there."""

    def steps_wait(self, event: Any) -> None:
        pass


class CopiesDoNotWait(SimulatedLane):
    """The fault: a copy overwrites what a step still reads."""

    def copies_wait(self, event: Any) -> None:
        pass


class BlocksComeBackEarly(SimulatedLane):
    """The fault: the next batch is packed over one that is still to be copied."""

    def is_done(self, event: Any) -> bool:
        return True
