"""The timer: seconds a call, medians and quantiles of several rounds, peak memory, and a description of the machine."""

from __future__ import annotations

import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fastbert.version import __version__


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the median and the 20 % and 80 % quantiles of one sample a round."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        ordered = sorted(seconds)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)], len(ordered))

    def to_dict(self) -> dict:
        return asdict(self)


def measure_once(call: Callable[[], object], min_seconds: float) -> float:
    """Seconds a call, over as many calls as fill `min_seconds` (at least one). Waits for the GPU where there is one."""
    calls, start = 0, time.perf_counter()
    while True:
        call()
        calls += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        if elapsed >= min_seconds:
            return elapsed / calls


def peak_memory() -> int:
    """Bytes of this process's resident memory at its highest: libraries, weights and whatever loading needed.

    On Linux from /proc, since getrusage's ru_maxrss (KiB) begins at what the parent had when it started the process.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(li.split()[1]) for li in status.read_text().splitlines() if li.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cpu_name() -> str:
    name, cpuinfo = platform.processor(), Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), name)


def describe_machine() -> dict:
    """What a result must say about where it came from."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=False,
    ).stdout.strip()
    return {
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastbert": __version__,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }
