"""`fastbert build` compiles the C++ kernels for the torch that is there, where the installation has none that fit."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fastbert.cli.parser import UsageError, add_command
from fastbert.cli.stopping import raise_if_stopped, say

STEP = re.compile(r"\[(\d+)/(\d+)\] ")  # ninja's, before a command
FAULT = re.compile(r"\b(?:fatal |internal compiler |collect2: )?error: .*|.*No space left on device.*")

OURS = "fastbert: "  # before what the recipe says
NOTHING = "pure Python, because "  # what it says where an installation goes on without kernels


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "build",
        run,
        "compile the C++ kernels for the torch that is here",
        """
        Compiles the C++ kernels that come with fastbert, for this Python and torch, into a cache folder
        (FASTBERT_CACHE, or fastbert in the folder of your caches). From then on they are used. It needs a C++
        compiler (CXX names it) and takes a few minutes, less with `pip install ninja`. The CUDA part is built where
        an nvcc fits torch (FASTBERT_BUILD_CUDA: auto, 0, 1).
        """,
        "fastbert build",
    )
    parser.add_argument("--force", action="store_true", help="also if they were built already")


def run(options: argparse.Namespace) -> int:
    import torch

    from fastbert.native import cache, recipe

    raise_if_stopped()
    if (unsupported := recipe.unsupported()) is not None:
        raise UsageError(unsupported)
    there, _ = cache.find(torch.__version__)
    if there is not None and not options.force and _is_what_is_asked_for(there.stamp, recipe.compiler_version()):
        say(f"{there.path} is there already; --force builds it anew")
        return 0
    folder = cache.folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder, ignore_cleanup_errors=True) as work:
        log: list[str] = []
        if (code := _compile(Path(recipe.__file__), Path(work), log)) != 0:
            raise UsageError(_reason(code, log, folder / "build.log"))
        (library,) = Path(work, "fastbert").glob("_C.*.so")
        build = cache.keep(library, torch.__version__)
    (chosen,) = (line for line in log if line.startswith(OURS))
    say(f"{chosen.removeprefix(OURS).strip()} -> {build.path}")
    return 0


def _is_what_is_asked_for(stamp: dict[str, Any], compiler: str) -> bool:
    lacks_cuda = os.environ.get("FASTBERT_BUILD_CUDA") == "1" and stamp["cuda"] is None
    return stamp["compiler"] == compiler and not lacks_cuda


def _compile(program: Path, work: Path, log: list[str]) -> int:
    """Run the recipe in `work`, and keep what it prints; its exit code. Nothing of it outlives this call."""
    scripts = sysconfig.get_path("scripts")  # where pip puts ninja, in an environment that was not activated, too
    environment = {**os.environ, "TMPDIR": str(work), "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}
    with _progress() as show:
        child = subprocess.Popen(
            [sys.executable, str(program), str(work)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                log.append(line)
                if step := STEP.match(line):
                    show(int(step[1]), int(step[2]))
            return child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGTERM)  # on which ninja ends the compilers, which are in groups of their own
            with suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=10)  # until nothing writes to the pipe any more
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            raise


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal. Elsewhere one line: what comes takes minutes."""
    from tqdm import tqdm

    if sys.stderr is None or not sys.stderr.isatty():
        say("compiling the C++ kernels, which takes a few minutes")
        yield lambda done, total: None
        return
    with tqdm(desc="compiling", unit=" files", dynamic_ncols=True, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _reason(code: int, log: list[str], path: Path) -> str:
    """Why there is no library, in one line; what a compiler has said is kept in a file."""
    if code < 0:
        return f"it was built, but ends the process that loads it (signal {-code})"
    last = next((line.strip().removeprefix(OURS) for line in reversed(log) if line.strip()), "nothing was said")
    if not last.startswith(NOTHING):
        return last
    faults = [match.group().strip() for line in log if (match := FAULT.search(line))]
    reason = f"the C++ extension did not compile: {faults[0]}" if faults else last.removeprefix(NOTHING)
    try:
        path.write_text("".join(log), encoding="utf-8")
    except OSError:  # a full disk may be what went wrong
        return reason
    return f"{reason}; {path} has what the compiler said"
