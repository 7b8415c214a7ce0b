"""What the benchmarks of the server have in common: how it is started, and where the report goes."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fastbert.bench.report import write_report
from fastbert.bench.timing import describe_machine

MODEL = "all-MiniLM-L6-v2"
PORT = 8311  # and the next ones


def parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """With the folder for the report `name`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, help=f"a folder for {name}.json and {name}.md")
    return made


def serve_command(dtype: str, port: int = PORT) -> list[str]:
    """Of `running`: our server of MODEL."""
    return ["-m", "fastbert", "serve", MODEL, "--device", "cpu", "--dtype", dtype, "--port", str(port)]


@contextmanager
def running(command: list[str], port: int = PORT, **options: Any) -> Iterator[subprocess.Popen]:
    """A server that takes connections; ended by SIGTERM (uvicorn alone then leaves with the signal).

    options: of Popen.
    """
    process = subprocess.Popen([sys.executable, *command], **options)
    try:
        while process.poll() is None:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            time.sleep(0.1)
        assert process.poll() is None, f"{command} left with {process.returncode}"
        yield process
    finally:
        process.terminate()
        status = process.wait(60)
    assert status in (0, -signal.SIGTERM), f"{command} left with {status}"


def machine_line(report: dict[str, Any]) -> str:
    machine = report["machine"]
    return (
        f"{machine['cpu']}, {report['cores']} cores that the clients share, torch {machine['torch']},"
        f" commit {machine['commit']}, {machine['date']}."
    )


def tell(name: str, found: dict[str, Any], to_markdown: Callable[[dict[str, Any]], str], output: Path | None) -> None:
    """Print the page of what was found on this machine; with a folder, write both there."""
    report = {"machine": describe_machine(), "cores": len(os.sched_getaffinity(0)), **found}
    page = to_markdown(report)
    print(page)
    if output is not None:
        write_report(output, name, report, page)
