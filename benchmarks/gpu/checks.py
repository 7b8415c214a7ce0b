"""What checks and times share: results and gradients against the oracle on the device itself, and the timer.

Contestants take turns, are timed by events, and find a cold second-level cache.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

Tensors = dict[str, torch.Tensor]
Function = Callable[..., torch.Tensor]
Check = tuple[str, Callable[[], None]]  # its name, and what raises AssertionError
Checks = Iterator[Check]
Call = Callable[[], object]


@dataclass(frozen=True)
class Where:
    """One backend in one dtype on one device; `smoke`: sizes for the interpreter."""

    device: torch.device
    dtype: torch.dtype
    backend: str
    smoke: bool

    def randn(self, *shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
        """Values of `dtype`, drawn in fp32."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return (torch.randn(shape, generator=generator, device=self.device) * scale).to(self.dtype)

    def integers(self, limit: int, *shape: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randint(limit, shape, generator=generator, device=self.device)

    def choose(self, small, large):
        return small if self.smoke else large


def has_kernel(where: Where) -> bool:
    return where.backend != "torch"  # whose sums by index are in no fixed order on a GPU


def differentiate(function: Function, tensors: Tensors, seed: int = 7) -> Tensors:
    """{"out": function(**tensors), "d" + name: gradient}; the cotangent is the same in every dtype."""
    dtype = next(iter(tensors.values())).dtype
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    out = function(**leaves)
    generator = torch.Generator(out.device).manual_seed(seed)
    # Exact in bf16 and fp16: small whole eighths.
    dout = torch.randint(-16, 17, out.shape, generator=generator, device=out.device) / 8 if out.dim() else None
    if out.requires_grad:  # the formula of nothing at all has no graph
        out.backward(None if dout is None else dout.to(out.dtype))
    gradients = {f"d{n}": torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()}
    assert all(t.dtype == dtype for t in gradients.values())
    return {"out": out.detach(), **gradients}


def compare(ours: Function, literal: Function, tensors: Tensors, infers: bool = True) -> None:
    """Output and gradients of `ours` against the oracle, `literal` in float64, by the error rule; and in inference."""
    actual = differentiate(ours, tensors)
    baseline = differentiate(literal, tensors)
    oracle = differentiate(literal, {name: t.double() for name, t in tensors.items()})
    for name, found in actual.items():
        factor = OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR
        assert_close_to_reference(found, oracle[name], baseline[name].to(found.dtype), factor, name)
    if infers:
        with torch.no_grad():  # where less is written down for backward
            assert torch.equal(ours(**tensors), actual["out"]), "inference gives other bits than training"


def same_bits(one: Tensors, other: Tensors) -> None:
    differing = [name for name in one if not torch.equal(one[name], other[name])]
    assert not differing, f"two runs differ in {', '.join(differing)}"


def repeats(function: Function, tensors: Tensors) -> None:
    """Forward and backward give the same bits twice."""
    same_bits(differentiate(function, tensors), differentiate(function, tensors))


def isolates_rows(function: Function, tensors: Tensors) -> None:
    """NaN in one row of x reaches no other, in out (..., rows, width) or dx."""
    rows = tensors["x"].shape[0]
    spoiled = {**tensors, "x": tensors["x"].clone()}
    spoiled["x"][rows // 2] = float("nan")
    clean, dirty = (differentiate(function, t) for t in (tensors, spoiled))
    others = torch.arange(rows, device=spoiled["x"].device) != rows // 2
    one, other = (t["out"][..., others, :] for t in (clean, dirty))
    assert torch.equal(one, other), "a row's output changed with another's input"
    assert torch.equal(clean["dx"][others], dirty["dx"][others]), "a row's gradient changed with another's input"


def assert_keep_rate(kept: torch.Tensor, dropout_p: float) -> None:
    """Six standard deviations of a coin's count."""
    share, draws = kept.double().mean().item(), kept.numel()
    bound = 6 * (dropout_p * (1 - dropout_p) / draws) ** 0.5
    assert abs(share - (1 - dropout_p)) < bound, f"{share:.6f} of {draws} were kept, not {1 - dropout_p} +- {bound:.6f}"


# --------------------------------------------------------------------------------------------------------------------
# The timer

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


# --------------------------------------------------------------------------------------------------------------------
# feed_forward's kernels, which are checked, timed and tuned


@contextmanager
def planned(plan: object) -> Iterator[None]:
    """feed_forward's Triton kernels as `plan` says, in place of kernels/feed_forward.py's choice."""
    kernels = importlib.import_module("fastbert.kernels.feed_forward")
    chosen = kernels.PLAN
    kernels.PLAN = plan  # type: ignore[attr-defined]
    try:
        yield
    finally:
        kernels.PLAN = chosen  # type: ignore[attr-defined]


def feed_forward_plans(where: Where, gated: bool = False) -> dict[str, object]:
    """Both ways of kernels/feed_forward.py: a kernel after torch's GEMM, which is its choice, and an epilogue, which it
    may choose once that has been timed, with the blocks of kernels/blocks.py and with others. The CUDA backend, which
    has one way alone, heeds none of them."""
    blocks = importlib.import_module("fastbert.kernels.blocks")

    def epilogue(up: tuple[int, ...], down: tuple[int, ...]) -> object:
        plan: object = blocks.FeedForwardPlan(blocks.gemm_blocks(*up), blocks.gemm_blocks(*down))
        return plan

    elementwise: dict[str, object] = {"elementwise": blocks.FeedForwardPlan()}
    if where.smoke:
        return elementwise | {"epilogue": epilogue((16, 32, 16, 4, 2), (16, 32, 16, 4, 2))}
    columns = 64 if gated else 128  # of a program, which has two sums where they are gated
    return elementwise | {
        "epilogue": blocks.epilogue_of(torch.device(where.device), gated),
        "epilogue 4 stages": epilogue((128, columns, 64, 8, 4), (128, 64, 64, 8, 4)),
        "epilogue 4 warps": epilogue((128, columns, 64, 4, 3), (64, 64, 64, 4, 3)),
    }


def feed_forward_sizes(where: Where) -> tuple[tuple[int, int], ...]:
    """(hidden_size, columns of a gated one's halves, or 0) of what is timed; ModernBERT's are gated."""
    sizes: tuple[tuple[int, int], ...] = where.choose(
        ((32, 0), (32, 48)), ((384, 0), (768, 0), (1024, 0), (768, 1152), (1024, 2624))
    )
    return sizes


def feed_forward_rows(where: Where) -> tuple[int, ...]:
    """Counts of tokens on which it is timed."""
    rows: tuple[int, ...] = where.choose((16,), (1024, 4096, 16384, 65536))
    return rows


def feed_forward_operands(where: Where, rows: int, hidden_size: int, inner: int, gated: bool = False) -> Tensors:
    up_size = 2 * inner if gated else inner
    return {
        "x": where.randn(rows, hidden_size),
        "up_weight": where.randn(up_size, hidden_size, scale=hidden_size**-0.5, seed=1),
        "up_bias": where.randn(up_size, seed=2),
        "down_weight": where.randn(hidden_size, inner, scale=inner**-0.5, seed=3),
    }
