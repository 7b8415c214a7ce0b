"""The entry of `fastbert ...`. Whatever takes time is imported inside `main`, which catches a Ctrl-C."""

from __future__ import annotations

from fastbert.cli import stopping


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns its exit code: 0, 1 (doctor found a fault), 2 (a user's error), 130 (Ctrl-C), 141 (the reader of its
    output has gone) or 143 (SIGTERM). Without arguments the process's own are run, and a Ctrl-C behind them ends the
    process at once: Python shuts down then, and of what is in its way libraries would print their insides.
    """
    restore = []
    try:
        try:
            restore = stopping.catch_signals(is_process=arguments is None)
            from fastbert.cli.run import run

            return run(arguments)
        finally:
            for undo in restore:
                undo()
    except BaseException as error:
        # A signal that met C++ which was calling Python comes out as that call's error: what ends a command once a
        # signal has come is the signal.
        stopped_by = type(error) if isinstance(error, KeyboardInterrupt) else next(iter(stopping.received), None)
        if stopped_by is None or isinstance(error, SystemExit):
            raise
        was_terminated = issubclass(stopped_by, stopping.Terminated)
        stopping.say("terminated" if was_terminated else "interrupted")
        return stopping.TERMINATED if was_terminated else stopping.INTERRUPTED
    finally:
        stopping.received.clear()
