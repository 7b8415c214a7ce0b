"""Attention's blocks on this GPU: candidates beside what kernels/blocks.py has, each pass alone, in turn.

`make gpu PART=tune`; nothing is changed by it. First processes beside each other compile the candidates and run each
once: what spills says so, and what does not compile, or crashes, is not timed. Triton keeps what it compiled on disk.
`python -m benchmarks.gpu.tune '{...}'` is such a process.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.checks import Where
from benchmarks.gpu.record import Record, failures_of_a_kernel
from benchmarks.gpu.timer import Timer
from fastbert.testing.cases import Lengths

LENGTHS = (128, 512, 1024, 2048)
PRODUCTS = {"fwd": 2, "dkdv": 4, "dq": 3}  # of a pass, each of 2 operations a score and element of a head
KERNELS = {"delta": "_attention_records_kernel", "dkdv": "_attention_dkdv_kernel", "dq": "_attention_dq_kernel"}
COMPILE_SHARE, COMPILE_SECONDS = 0.5, 240.0  # of the time that is left, and at most
LEAST_SECONDS = 5.0  # a candidate is not begun with less
RESULT = "result: "  # what a line of a compiling process begins with


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
    try:
        yield
    finally:
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
            self.q, self.k, self.v, self.tiles_of(tile), None, tile, head_dim**-0.5, 0.0, (-1, -1), True
        )

    def tile_of(self, candidate: Candidate | None) -> int:
        choose = importlib.import_module("fastbert.ops.attention")._tile
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
        shared = (self.tiles_of(tile), None, tile, self.head_dim**-0.5, 0.0, (-1, -1))
        with alone(which, candidate):
            if which == "fwd":
                return (_module("attention_fwd").attention_fwd(self.q, self.k, self.v, *shared, False)[0],)
            operands = (self.dout, self.q, self.k, self.v, self.out, self.stats)
            dq, dk, dv = _module("attention_bwd").attention_bwd(*operands, *shared, None, None).unbind(1)
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
# Compiling, in processes beside each other


def compile_here(where: Where, task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each candidate run once: {"candidate", "spills" and "registers", or "why not"}."""
    for head_dim, which, values in task["asked"]:
        candidate = Candidate(*values)
        found: dict[str, Any] = {"candidate": [head_dim, which, *candidate]}
        module, name = (
            ("attention_fwd", "_attention_fwd_kernel") if which == "fwd" else ("attention_bwd", KERNELS[which])
        )
        try:
            Batch(where, head_dim, where.choose(32, 512)).run(which, candidate)
            if where.device.type == "cuda":
                torch.cuda.synchronize()
                caches = getattr(_module(module), name).device_caches[torch.cuda.current_device()]
                *_, kernel = caches[0].values()  # the newest is the candidate's
                found |= {"spills": kernel.n_spills, "registers": kernel.n_regs}
        except failures_of_a_kernel() as error:
            found["why not"] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        yield found
        if "CUDA error" in found.get("why not", ""):
            return


def compile_all(record: Record, asked: list[tuple[int, str, Candidate]]) -> dict[tuple, dict[str, Any]]:
    """{(head_dim, pass, *candidate): what `compile_here` found} of those that were ready in time."""
    workers = max(1, min(15, (os.cpu_count() or 2) - 1))
    seconds = min(COMPILE_SECONDS, COMPILE_SHARE * record.left)

    def compile_share(share: list[tuple[int, str, Candidate]]) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "benchmarks.gpu.tune", json.dumps({"asked": share})]
        try:
            out = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False).stdout
        except subprocess.TimeoutExpired as expired:
            out = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
        lines = [line.removeprefix(RESULT) for line in out.splitlines() if line.startswith(RESULT) and line[-1] == "}"]
        return [json.loads(line) for line in lines]

    with ThreadPoolExecutor(workers) as pool:
        shares = [share for share in (asked[i::workers] for i in range(workers)) if share]
        return {tuple(found["candidate"]): found for share in pool.map(compile_share, shares) for found in share}


# --------------------------------------------------------------------------------------------------------------------


def few(timer: Timer, where: Where) -> dict[str, Any]:
    """For the part `ops`: whether the table's blocks are far from the best, by a few candidates a pass."""
    head_dim, length = where.choose((32, 32), (64, 512))
    batch, numbers = Batch(where, head_dim, length), {}
    table = [f"{which}, {batch.present(which).label}" for which in PRODUCTS]
    for (_, which), some in ((key, some) for key, some in candidates(where.smoke).items() if key[0] == head_dim):
        for candidate in some[:: where.choose(2, 4)]:
            numbers[f"{which}, {candidate.label}"] = contest(timer, [batch], which, candidate)
    return {"numbers": numbers, "unit": f"TFLOP/s, head_dim {head_dim}", "note": f"the table has {'; '.join(table)}"}


def run_part(record: Record) -> None:
    """The part `tune`."""
    where = Where(record.device, torch.bfloat16, "triton", record.smoke)
    timer = Timer(record.device, where.choose(2, 15))
    record.entries.pop("candidates", None)
    done = {(name, label) for name, entry in record.entries.items() for label in entry["numbers"]}
    asked = [(d, which, c) for (d, which), some in candidates(record.smoke).items() for c in some]
    asked = [(d, which, c) for d, which, c in asked if (_entry_of(d, which), c.label) not in done]
    compiled = {} if record.smoke else compile_all(record, asked)
    batches: dict[int, list[Batch]] = {}
    late = 0
    for head_dim, which, candidate in asked:
        found = compiled.get((head_dim, which, *candidate), {"registers": "", "spills": ""} if record.smoke else None)
        if found is None or record.left < LEAST_SECONDS:
            late += 1
            continue
        row: dict[str, Any] = {name: found[name] for name in ("registers", "spills", "why not") if name in found}
        if "why not" not in row:
            if head_dim not in batches:
                batches[head_dim] = [Batch(where, head_dim, n) for n in where.choose((32,), LENGTHS)]
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
        summary["failed"] = f"{late} of {len(asked)} candidates were not compiled, or not reached, in time"
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
    for found in compile_here(where, json.loads(sys.argv[1])):
        sys.stdout.write(f"{RESULT}{json.dumps(found)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
