"""The entry of `fastbert ...`. Whatever takes time is imported inside `main`, which catches a Ctrl-C."""

from __future__ import annotations

from fastbert.cli import stopping


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns its exit code: 0, 1 (doctor found a fault), 2 (a user's error), 130 (Ctrl-C), 141 (nobody reads what is
    printed) or 143 (SIGTERM).
    """
    restore = []
    try:
        restore = stopping.catch_signals()
        from fastbert.cli.run import run

        return run(arguments)
    except KeyboardInterrupt as error:
        was_terminated = isinstance(error, stopping.Terminated)
        stopping.say("terminated" if was_terminated else "interrupted")
        return stopping.TERMINATED if was_terminated else stopping.INTERRUPTED
    finally:
        for undo in restore:
            undo()
        stopping.received.clear()
