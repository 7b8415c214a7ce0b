"""The lines of a log, written by a thread of their own: a slow reader must not hold up the server."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable

WAITING = 1 << 20  # bytes of lines that wait to be written
END_S = 2.0  # for these, when the server has stopped


class Lines:
    """Writes lines to a file descriptor, whole and in order; as a context manager, up to END_S more at its end.

    What does not fit into WAITING bytes is dropped, and one line `lost(count)` then stands in its place. A line that
    cannot be written, as where the reader has gone, is gone, too: no reason to stop serving.
    """

    def __init__(self, descriptor: int, lost: Callable[[int], str]):
        self.descriptor, self.lost = descriptor, lost
        self.waiting: deque[bytes] = deque()
        self.bytes = self.dropped = 0
        self.ends = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, name="log", daemon=True)  # it may hang in a write

    def __enter__(self) -> Lines:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self.changed:
            self.ends = True
            self.changed.notify()
        self.thread.join(END_S)

    def write(self, line: str) -> None:
        """Does not wait for the reader, and does not raise."""
        data = f"{line}\n".encode()
        with self.changed:
            if self.bytes + len(data) > WAITING:
                self.dropped += 1
            else:
                self._tell()
                self._append(data)
            self.changed.notify()

    def _append(self, data: bytes) -> None:
        self.waiting.append(data)
        self.bytes += len(data)

    def _tell(self) -> None:
        if self.dropped:
            self._append(f"{self.lost(self.dropped)}\n".encode())
            self.dropped = 0

    def _run(self) -> None:
        while (data := self._next()) is not None:
            try:
                while data:
                    try:
                        data = data[os.write(self.descriptor, data) :]
                    except BlockingIOError:  # another process that shares it has made it so
                        select.select([], [self.descriptor], [])
            except OSError:
                pass

    def _next(self) -> bytes | None:
        """The next line; None at the end."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.dropped or self.ends)
            if not self.waiting:
                self._tell()
            if not self.waiting:
                return None
            data = self.waiting.popleft()
            self.bytes -= len(data)
            return data
