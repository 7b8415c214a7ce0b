"""One part's results, written to its file as they come: what is there already is not measured again."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.stamp import same_run

Say = Callable[[str], None]


def failures_of_a_kernel() -> tuple[type[BaseException], ...]:
    """What a broken kernel, or another version of torch or Triton, may raise."""
    python = (AssertionError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError, OSError)
    if util.find_spec("triton") is None:
        return python
    from triton.errors import TritonError

    return (*python, TritonError)


def run_limited(command: list[str], seconds: float, **options: Any) -> subprocess.CompletedProcess:
    """subprocess.run in a session of its own, which ends with its processes' processes. Raises TimeoutExpired."""
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@dataclass
class Record:
    """`entries` {name: what was found}; one with "failed" or "skipped" says why. `figures`: what targets are set for.

    smoke: small sizes, on any device; the numbers mean nothing. deadline: of time.monotonic(), when the part should be
    through; what it starts in sessions of their own would outlive its end.
    """

    part: str
    path: Path
    stamp: dict[str, Any]
    say: Say
    smoke: bool = False
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    complete: bool = False
    deadline: float = math.inf

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def failures(self) -> dict[str, str]:
        return {name: entry["failed"] for name, entry in self.entries.items() if "failed" in entry}

    @property
    def is_done(self) -> bool:
        return self.complete and not self.failures

    def run(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """`measure()` under `name`, unless that has been done; an exception fails this entry and nothing else."""
        if name in self.entries and "failed" not in self.entries[name]:
            return self.entries[name]
        start = time.perf_counter()
        try:
            entry = measure()
        except failures_of_a_kernel() as error:  # nothing is hidden: the part fails by it
            entry = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
            entry["traceback"] = traceback.format_exc(limit=-4)
        if "skipped" not in entry:
            entry["seconds"] = round(time.perf_counter() - start, 3)
        return self.add(name, entry)

    def add(self, name: str, entry: dict[str, Any]) -> dict[str, Any]:
        self.entries[name] = entry
        for kind in ("failed", "skipped"):
            if kind in entry:
                self.say(f"{self.part} {name}: {kind}: {entry[kind]}")
        self.write()
        return entry

    def write(self) -> None:
        content = {
            "part": self.part,
            "complete": self.complete,
            "smoke": self.smoke,
            "seconds": round(self.seconds, 1),
            "stamp": self.stamp,
            "figures": self.figures,
            "facts": self.facts,
            "entries": self.entries,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        half = self.path.with_suffix(".part")  # a kill never leaves half a file
        half.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        half.replace(self.path)


def open_record(
    part: str, folder: Path, stamp: dict[str, Any], say: Say, smoke: bool = False, again: bool = False
) -> Record:
    """A part's record, with what an earlier run of the same commit, kernels and machine has found."""
    record = Record(part, folder / f"{part}.json", stamp, say, smoke)
    if again or not record.path.exists():
        return record
    earlier = json.loads(record.path.read_text(encoding="utf-8"))
    if earlier.get("smoke") == smoke and same_run(earlier["stamp"], stamp):
        for name in ("entries", "figures", "facts", "complete", "seconds"):
            setattr(record, name, earlier[name])
    return record
