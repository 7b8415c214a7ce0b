"""Runs `fastbert ...` as a user does, in a process of its own, or in this one where only its words are looked at."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import warm

from fastbert import cli

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fastbert", *map(str, arguments)]


def command_without(modules: Sequence[str], *arguments: object) -> list[str]:
    """The same on a machine that lacks some modules."""
    program = f"import sys; sys.modules.update(dict.fromkeys({list(modules)}))"
    program += "; from fastbert.cli import main; sys.exit(main())"
    return [sys.executable, "-c", program, *map(str, arguments)]


def run_python(command: list[str], **environment: str) -> subprocess.CompletedProcess:
    return warm.run(command, env={**ENVIRONMENT, **environment})


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    return run_python(command(*arguments), **environment)


def run_here(*arguments: object) -> subprocess.CompletedProcess:
    """The same without a process of its own, whose imports take longer than most of what is tested."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings(record=True) as said:
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse's
            code = stop.code
    shown = "".join(f"{warning.message}\n" for warning in said)  # pytest keeps them from stderr
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue() + shown)


def fails(*arguments: object, **environment: str) -> str:
    """The error line of a command that must end with exit code 2, one line and no traceback."""
    done = run(*arguments, **environment) if environment else run_here(*arguments)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert done.stderr.startswith("fastbert: error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr
