"""Times on a GPU: contestants in turn, by events, with a cold second-level cache; and the machine's two ceilings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], object]

# Filling this before each call empties the cache, and lets the host run ahead: events then see the GPU's time alone.
# Three times is 1.5 ms on an H200, more than launching a call's kernels takes, with autograd's work around them.
FLUSH_BYTES, FLUSHES = 2 << 30, 3


class Timer:
    """Median seconds a call. On a CPU, by the clock and with few rounds: smoke tests only.

    `late` collects those during most of whose calls the GPU waited for the host: their times are not the GPU's. So it
    is for a call that asks the GPU for a number in between.
    """

    def __init__(self, device: torch.device, rounds: int):
        self.device, self.rounds = device, rounds
        self.is_gpu = device.type == "cuda"
        self.scratch = torch.empty(FLUSH_BYTES // 4 if self.is_gpu else 0, device=device)
        self.late: set[str] = set()

    def once(self, call: Call, lateness: list[bool]) -> Callable[[], float]:
        """Runs `call`; what comes back gives its seconds, once the GPU is through."""
        for _ in range(FLUSHES):
            self.scratch.zero_()
        if not self.is_gpu:
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            return lambda: seconds
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        lateness.append(begin.query())  # the GPU is at the call already, which has only now been launched to its end
        return lambda: begin.elapsed_time(end) / 1e3

    def medians(self, calls: Mapping[str, Call], warmup: int = 3) -> dict[str, float]:
        """Of contestants that take turns, so that what disturbs the GPU disturbs all."""
        for call in calls.values():
            for _ in range(warmup if self.is_gpu else 1):
                call()
        self.synchronize()
        samples: dict[str, list[Callable[[], float]]] = {name: [] for name in calls}
        lateness: dict[str, list[bool]] = {name: [] for name in calls}
        for i in range(self.rounds):
            for name, call in calls.items():
                samples[name].append(self.once(call, lateness[name]))
            if i % 8 == 7:  # the host must not run so far ahead that launches wait for room in the queue
                self.synchronize()
        self.synchronize()
        self.late |= {name for name, found in lateness.items() if 2 * sum(found) > self.rounds}
        return {name: statistics.median(seconds() for seconds in found) for name, found in samples.items()}

    def note(self) -> dict[str, str]:
        """For an entry: who was late since the last note."""
        late, self.late = sorted(self.late), set()
        return {"note": f"the GPU waited for the host: {', '.join(late)}"} if late else {}

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()


def ceilings(timer: Timer, smoke: bool) -> dict[str, Any]:
    """Bytes/s of a copy, read and write counted, and operations/s of a square product in bf16, both of this GPU now."""
    values, width = (1 << 16, 64) if smoke else (1 << 29, 8192)
    source = torch.randn(values, device=timer.device).bfloat16()
    target = torch.empty_like(source)
    a, b = (torch.randn(width, width, device=timer.device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    seconds = timer.medians({"copy": lambda: target.copy_(source), "gemm": lambda: torch.mm(a, b, out=out)})
    return {
        "copy_bytes_per_second": 2 * source.nbytes / seconds["copy"],
        "gemm_flops_per_second": 2 * width**3 / seconds["gemm"],
    }
