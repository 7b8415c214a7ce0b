"""How a command ends early, and what it then says: Ctrl-C, SIGTERM, a reader that has gone. Imports nothing."""

from __future__ import annotations

import sys

USER_ERROR, INTERRUPTED, BROKEN_PIPE, TERMINATED = 2, 130, 141, 143  # but for the first the shell's own: 128 + signal


class Terminated(KeyboardInterrupt):
    """SIGTERM: it ends a command as Ctrl-C does, so what was done so far is kept and nothing half-done is left."""


received: list[type[KeyboardInterrupt]] = []
_held = [False]


def catch_signals(is_process: bool = False):
    """Let SIGINT and SIGTERM raise, and be remembered; returns what undoes that: in a process that does nothing else,
    they then end it and raise nothing. Signals that others handle stay so, also where they took them over since: a
    server that has stopped ignores them.
    """
    import signal
    import threading

    if threading.current_thread() is not threading.main_thread():
        return []
    restore = []
    for number, default, error in (
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGTERM, signal.SIG_DFL, Terminated),
    ):

        def stop(number, frame, error=error):
            received.append(error)
            if not _held[0] or len(received) > 1:
                raise error

        if signal.getsignal(number) is default:
            signal.signal(number, stop)

            def undo(number=number, behind=signal.SIG_DFL if is_process else default, stop=stop):
                if signal.getsignal(number) is stop:
                    from fastbert.native.signals import set_handler

                    set_handler(number, behind)

            restore.append(undo)
    return restore


class held:
    """Let what is done here end before a signal stops the command, as a line that is written; a second one does not
    wait: perhaps the line has no reader.
    """

    def __enter__(self):
        _held[0] = True

    def __exit__(self, error_type, error, trace):
        _held[0] = False
        if error_type is None:
            raise_if_stopped()


def raise_if_stopped() -> None:
    """Raise once more what a bare `except` has swallowed: torch's import has some."""
    if received:
        raise received[0]


def say(line: str) -> None:
    """One line on stderr; lost where it cannot be read, which is no reason to stop working."""
    if sys.stderr is None:
        return
    try:
        print(f"fastbert: {line}", file=sys.stderr)
    except OSError:
        discard(sys.stderr)


def discard(stream) -> None:
    """Let a stream whose reader has gone, or whose disk is full, lead nowhere: Python's exit must not fail again."""
    import os

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
