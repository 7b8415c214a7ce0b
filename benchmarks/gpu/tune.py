"""Candidates beside what ships: attention's blocks, each pass alone, and the plans of feed-forward.

`make gpu PART=tune`, and a few of them in `ops`; nothing is changed by it. A candidate is tried before it is timed, by
processes beside each other that compile it, run it on what it will be timed on, and compare it with what ships. One
that does not compile, is wrong, faults or hangs takes nothing else with it. Triton keeps what they compiled on disk.
`python -m benchmarks.gpu.tune '{...}'` is such a process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.checks import (
    Timer,
    Where,
    feed_forward_operands,
    feed_forward_plans,
    feed_forward_rows,
    feed_forward_sizes,
    planned,
)
from benchmarks.gpu.record import Record, failures_of_a_kernel, results_of, say_result
from benchmarks.gpu.rowwise import feed_forward_case
from fastbert import ops
from fastbert.testing.cases import Lengths

LENGTHS = (128, 512, 1024, 2048)
PRODUCTS = {"fwd": 2, "dkdv": 4, "dq": 3}  # of a pass, each of 2 operations a score and element of a head
KERNELS = {"delta": "_attention_records_kernel", "dkdv": "_attention_dkdv_kernel", "dq": "_attention_dq_kernel"}
SHIPPED_PLAN = "elementwise"  # of feed_forward_plans
TRIAL_SHARE, TRIAL_SECONDS = 0.5, 240.0  # of the time that is left, and at most
LEAST_SECONDS = 5.0  # a candidate is not begun with less


class Candidate(NamedTuple):
    tile: int
    step: int
    num_warps: int
    num_stages: int

    @property
    def label(self) -> str:
        return f"{self.tile} x {self.step}, {self.num_warps} warps, {self.num_stages} stages"


# {(head_dim, pass): ((tiles, steps, warps, stages), ...)}, all combinations of each: of what was compiled for sm_90,
# that which spills nothing, or next to nothing.
_GRIDS = {
    (64, "fwd"): (
        ((128,), (64, 128), (8,), (2, 3, 4)), ((128,), (64,), (4,), (2, 3)), ((64,), (64,), (4,), (2, 3)),
        ((64,), (128,), (4,), (2,)),
    ),
    (64, "dkdv"): (
        ((128,), (32,), (8,), (2, 3)), ((128,), (64,), (8,), (2,)), ((64,), (32,), (4,), (2, 3)),
        ((64,), (64,), (4, 8), (2,)),
    ),
    (64, "dq"): (
        ((128,), (32, 64), (8,), (2, 3)), ((128,), (128,), (8,), (2,)), ((128,), (32,), (4,), (2, 3)),
        ((64,), (32, 64), (4,), (2, 3)), ((64,), (128,), (4,), (2,)),
    ),
    (128, "fwd"): (
        ((128,), (32, 64), (8,), (2, 3)), ((64,), (64,), (4, 8), (2, 3)), ((64,), (128,), (8,), (2,)),
    ),
    (128, "dkdv"): (((128,), (32,), (8,), (1, 2)), ((64,), (32,), (8,), (1, 2, 3)), ((64,), (64,), (8,), (1, 2))),
    (128, "dq"): (((128,), (32, 64), (8,), (1, 2, 3)), ((64,), (32, 64), (8,), (2, 3)), ((64,), (32,), (4,), (2, 3))),
}  # fmt: skip
_SMOKE = {(32, "fwd"): (((16, 32), (16,), (4,), (2,)),), (32, "dkdv"): (((32,), (16,), (4,), (2,)),)}


def candidates(smoke: bool) -> dict[tuple[int, str], list[Candidate]]:
    """{(head_dim, pass): candidates}."""
    grids = _SMOKE if smoke else _GRIDS
    return {key: [Candidate(*c) for grid in several for c in product(*grid)] for key, several in grids.items()}


def _module(name: str) -> Any:
    return importlib.import_module(f"fastbert.kernels.{name}")


class _Nothing:
    """A kernel that is not launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **options: None


@contextmanager
def alone(which: str, candidate: Candidate | None) -> Iterator[None]:
    """Of backward only the pass `which` and delta, which it reads, or delta alone; with the candidate's blocks, or
    without one those of kernels/blocks.py."""
    blocks, backward = _module("blocks"), _module("attention_bwd")
    chosen = blocks.blocks_of
    kept = {name: getattr(backward, name) for name in KERNELS.values()}
    if candidate is not None:
        tile, step, num_warps, num_stages = candidate
        own = blocks.Blocks(tile, step, max(1, 64 // tile), num_warps, num_stages)
        blocks.blocks_of = lambda asked, *others: own if asked == which else chosen(asked, *others)
    for role in {*KERNELS} - {which, "delta"}:
        setattr(backward, KERNELS[role], _Nothing())
    _module("launching").forget()
    try:
        yield
    finally:
        _module("launching").forget()
        blocks.blocks_of = chosen
        for name, kernel in kept.items():
            setattr(backward, name, kernel)


class Batch:
    """Sequences of one length: 16384 tokens, 1024 wide."""

    def __init__(self, where: Where, head_dim: int, length: int):
        total, width = where.choose((64, 64), (16384, 1024))
        self.heads, self.head_dim, self.length = width // head_dim, head_dim, length
        case = Lengths("", (length,) * (total // length))
        self.cu_seqlens, self.total = case.cu_seqlens.to(where.device), case.total_tokens
        self.q, self.k, self.v, self.dout = (where.randn(total, self.heads, head_dim, seed=i) for i in range(4))
        self.tiles: dict[int, torch.Tensor] = {}
        tile = self.tile_of(None)
        self.out, self.stats = _module("attention_fwd").attention_fwd(
            self.q, self.k, self.v, self.tiles_of(tile), None, None, tile, head_dim**-0.5, 0.0, (-1, -1), True
        )

    def tile_of(self, candidate: Candidate | None) -> int:
        choose = importlib.import_module("fastbert.ops.attention.attention")._tile
        tile: int = choose(self.head_dim, self.length, False) if candidate is None else candidate.tile
        return tile

    def tiles_of(self, tile: int) -> torch.Tensor:
        if tile not in self.tiles:
            self.tiles[tile] = _module("attention").attention_tiles(self.cu_seqlens, self.total, tile)
        return self.tiles[tile]

    def present(self, which: str) -> Candidate:
        """What kernels/blocks.py has."""
        found = _module("blocks").attention_blocks(which, self.q, self.tile_of(None), False)
        return Candidate(found.tile, found.step, found.num_warps, found.num_stages)

    def run(self, which: str, candidate: Candidate | None) -> tuple[torch.Tensor, ...]:
        """The results of the pass."""
        tile = self.tile_of(candidate)
        shared = (self.tiles_of(tile), None, None, tile, self.head_dim**-0.5, 0.0, (-1, -1))
        with alone(which, candidate):
            if which == "fwd":
                return (_module("attention_fwd").attention_fwd(self.q, self.k, self.v, *shared, False)[0],)
            operands = (self.dout, self.q, self.k, self.v, self.out, self.stats)
            dqkv = _module("attention_bwd").attention_bwd(*operands, *shared, None, None, False, False)
        dq, dk, dv = dqkv.chunk(3, 1)
        return {"delta": (), "dkdv": (dk, dv), "dq": (dq,)}[which]

    def check(self, which: str, candidate: Candidate) -> None:
        """It must give what the table's blocks give, which the part `kernels` compares with the oracle."""
        for found, expected in zip(self.run(which, candidate), self.run(which, None), strict=True):
            error, largest = (found.double() - expected.double()).abs().max().item(), expected.abs().max().item()
            bound = 4 * torch.finfo(found.dtype).eps * largest
            assert error <= bound, f"differs from the table's by {error:.3g}"

    def rates(self, timer: Timer, which: str, candidate: Candidate) -> tuple[float, float]:
        """TFLOP/s of the candidate, and its speed over that of the table's blocks."""
        calls = {"table": lambda: self.run(which, None), "candidate": lambda: self.run(which, candidate)}
        if which != "fwd":
            calls["delta"] = lambda: self.run("delta", None)
        seconds = timer.medians(calls)
        table, own = (seconds[name] - seconds.get("delta", 0.0) for name in ("table", "candidate"))
        operations = 2.0 * PRODUCTS[which] * self.heads * self.head_dim * self.total * self.length
        return operations / own / 1e12, table / own


def contest(timer: Timer, batches: list[Batch], which: str, candidate: Candidate) -> dict[str, float | str]:
    """A row of a table: TFLOP/s a length, and over the table's blocks; or why there is none."""
    row: dict[str, float | str] = {}
    try:
        for batch in batches:
            batch.check(which, candidate)
            rate, gain = batch.rates(timer, which, candidate)
            row |= {f"{batch.length}": rate, f"{batch.length}, over the table's": gain}
    except failures_of_a_kernel() as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        if "CUDA error" in message:  # nothing runs in this process any more
            raise
        row["why not"] = message
    return row


# --------------------------------------------------------------------------------------------------------------------
# Trials, in processes beside each other


def try_blocks(where: Where, head_dim: int, which: str, values: list[int], lengths: list[int]) -> dict[str, Any]:
    """One of attention's candidates, on batches of every length: what it spills, or why it may not be timed."""
    candidate = Candidate(*values)
    found: dict[str, Any] = {}
    for length in lengths:
        batch = Batch(where, head_dim, length)
        batch.run(which, candidate)
        if where.device.type == "cuda" and not found:
            module, name = ("fwd", "_attention_fwd_kernel") if which == "fwd" else ("bwd", KERNELS[which])
            caches = getattr(_module(f"attention_{module}"), name).device_caches[torch.cuda.current_device()]
            *_, kernel = caches[0].values()  # the newest is the candidate's
            found = {"spills": kernel.n_spills, "registers": kernel.n_regs}
        batch.check(which, candidate)
    return found


def try_plan(where: Where, hidden_size: int, inner: int, gated: bool, name: str) -> dict[str, Any]:
    """One of feed-forward's plans, against the oracle, and on every count of tokens that it will be timed on."""
    plan = feed_forward_plans(where, gated)[name]
    feed_forward_case(where, plan, (where.choose(16, 1000), hidden_size, inner), "gelu", not gated, gated)
    for rows in feed_forward_rows(where):
        operands = feed_forward_operands(where, rows, hidden_size, inner, gated)
        leaves = {n: t.requires_grad_() for n, t in operands.items() if not gated or n != "up_bias"}
        x, up, bias, down = (leaves.get(n) for n in ("x", "up_weight", "up_bias", "down_weight"))
        assert x is not None and up is not None and down is not None
        with planned(plan):
            out = ops.feed_forward(x, up, bias, down, gated=gated, backend=where.backend)
            torch.autograd.grad(out, list(leaves.values()), out.detach())
    return {}


TRIALS: dict[str, Callable[..., dict[str, Any]]] = {"blocks": try_blocks, "plan": try_plan}
Trial = tuple[Any, ...]  # one of TRIALS and its arguments


def try_here(where: Where, trials: list[Trial]) -> Iterator[dict[str, Any]]:
    """What each found, or {"why not"}. After an error of the GPU itself nothing can run in this process."""
    for kind, *arguments in trials:
        try:
            found = TRIALS[kind](where, *arguments)
            if where.device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # they share the GPU
        except failures_of_a_kernel() as error:
            found = {"why not": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
        yield found
        if "CUDA error" in found.get("why not", ""):
            return


def tried(record: Record, where: Where, trials: list[Trial]) -> list[dict[str, Any] | None]:
    """What `try_here` found of each; None for those that were not reached in time."""
    if record.smoke:  # starting a process takes longer than the trials
        return list(try_here(where, trials))
    workers = max(1, min(15, (os.cpu_count() or 2) - 1))
    seconds = min(TRIAL_SECONDS, TRIAL_SHARE * record.left)

    def try_share(share: list[Trial]) -> list[dict[str, Any] | None]:
        found, died = results_of([sys.executable, "-m", "benchmarks.gpu.tune", json.dumps(share)], seconds)
        if died is not None and found and "CUDA error" in found[-1].get("why not", ""):
            died = None
        if died is not None and len(found) < len(share):  # the next one has ended the process, or has hung in it
            found.append({"why not": died})
        return [*found, *[None] * (len(share) - len(found))]

    with ThreadPoolExecutor(workers) as pool:
        shares = list(pool.map(try_share, [trials[i::workers] for i in range(min(workers, len(trials)))]))
    return [shares[i % workers][i // workers] for i in range(len(trials))]


# --------------------------------------------------------------------------------------------------------------------


def try_for_ops(record: Record, where: Where) -> dict[str, Any]:
    """All candidates that the part `ops` times, tried: {"numbers": {label: what was found}}."""
    head_dim, length = few_shape(where)
    trials: dict[str, Trial] = {
        f"{which}, {candidate.label}": ("blocks", head_dim, which, candidate, [length])
        for which, candidate in few_candidates(where)
    }
    for hidden_size, gated_size in feed_forward_sizes(where):
        for name in feed_forward_plans(where, gated_size > 0):
            if name != SHIPPED_PLAN:
                sizes = (hidden_size, gated_size or 4 * hidden_size, gated_size > 0)
                trials[plan_label(hidden_size, gated_size, name)] = ("plan", *sizes, name)
    found = tried(record, where, list(trials.values()))
    rows = [{"why not": "not tried in time"} if each is None else each for each in found]
    return {"numbers": dict(zip(trials, rows, strict=True))}


def is_tried(record: Record, label: str) -> bool:
    """Whether it may be timed in this process."""
    trials = record.entries.get("candidates", {}).get("numbers", {})
    return label in trials and "why not" not in trials[label]


def plan_label(hidden_size: int, gated_size: int, name: str) -> str:
    return f"{'gated ' if gated_size else ''}feed_forward {hidden_size}, {name}"


def few_shape(where: Where) -> tuple[int, int]:
    """(head_dim, length) of `few`."""
    shape: tuple[int, int] = where.choose((32, 32), (64, 512))
    return shape


def few_candidates(where: Where) -> Iterator[tuple[str, Candidate]]:
    for (head_dim, which), some in candidates(where.smoke).items():
        if head_dim == few_shape(where)[0]:
            yield from ((which, candidate) for candidate in some[:: where.choose(2, 4)])


def few(record: Record, timer: Timer, where: Where) -> dict[str, Any]:
    """For the part `ops`: whether the table's blocks are far from the best, by a few candidates a pass."""
    head_dim, length = few_shape(where)
    batch, numbers = Batch(where, head_dim, length), {}
    table = [f"{which}, {batch.present(which).label}" for which in PRODUCTS]
    for which, candidate in few_candidates(where):
        label = f"{which}, {candidate.label}"
        if is_tried(record, label):
            numbers[label] = contest(timer, [batch], which, candidate)
    return {"numbers": numbers, "unit": f"TFLOP/s, head_dim {head_dim}", "note": f"the table has {'; '.join(table)}"}


def run_part(record: Record) -> None:
    """The part `tune`."""
    where = Where(record.device, torch.bfloat16, "triton", record.smoke)
    timer = Timer(record.device, where.choose(2, 15))
    record.entries.pop("candidates", None)
    done = {(name, label) for name, entry in record.entries.items() for label in entry["numbers"]}
    asked = [(d, which, c) for (d, which), some in candidates(record.smoke).items() for c in some]
    asked = [(d, which, c) for d, which, c in asked if (_entry_of(d, which), c.label) not in done]
    lengths = where.choose((32,), LENGTHS)
    trials = tried(record, where, [("blocks", head_dim, which, c, lengths) for head_dim, which, c in asked])
    batches: dict[int, list[Batch]] = {}
    late = 0
    for (head_dim, which, candidate), found in zip(asked, trials, strict=True):
        if found is None or record.left < LEAST_SECONDS:
            late += 1
            continue
        row: dict[str, Any] = {name: found[name] for name in ("registers", "spills", "why not") if name in found}
        if "why not" not in row:
            if head_dim not in batches:
                batches[head_dim] = [Batch(where, head_dim, n) for n in lengths]
            row = {**contest(timer, batches[head_dim], which, candidate), **row}
        name = _entry_of(head_dim, which)
        entry = record.entries.get(name, {"numbers": {}, "unit": "TFLOP/s by sequence length, 16384 tokens"})
        entry["numbers"][candidate.label] = row
        record.add(name, entry)
    summary: dict[str, Any] = {"numbers": best(record, where)}
    for name, row in summary["numbers"].items():
        record.say(
            f"{name}: {', '.join(f'{k} {v:.3g}' if isinstance(v, float) else f'{k} {v}' for k, v in row.items())}"
        )
    if late:
        summary["failed"] = f"{late} of {len(asked)} candidates were not tried, or not reached, in time"
    record.add("candidates", summary)


def _entry_of(head_dim: int, which: str) -> str:
    return f"{which}, head_dim {head_dim}"


def best(record: Record, where: Where) -> dict[str, dict[str, float | str]]:
    """A row a pass, head size and length: the table's blocks, and the fastest candidate where one is faster."""
    rows: dict[str, dict[str, float | str]] = {}
    for head_dim, which in candidates(record.smoke):
        numbers = record.entries.get(_entry_of(head_dim, which), {"numbers": {}})["numbers"]
        for length in where.choose((32,), LENGTHS):
            timed = {label: row for label, row in numbers.items() if f"{length}" in row and not row.get("spills")}
            if timed:
                label, row = max(timed.items(), key=lambda item: item[1][f"{length}, over the table's"])
                gain = row[f"{length}, over the table's"]
                present = Batch(where, head_dim, length).present(which).label
                found = {"table": present, "best": label, "TFLOP/s": row[f"{length}"], "over the table's": gain}
                rows[f"{which} head_dim {head_dim} S {length}"] = found
    return rows


def main() -> None:
    where = Where(torch.device("cuda"), torch.bfloat16, "triton", False)
    for found in try_here(where, json.loads(sys.argv[1])):
        say_result(found)


if __name__ == "__main__":
    main()
