"""The training step of BERT-base with masked words: right as a graph, and how fast in each of its ways.

Its first minutes compare captured steps with the same steps that run each time. Then ours (op by op, all layers as one
op, graphs) and transformers (eager and compiled, padded) take turns on the same batches, at 1k to 64k tokens a step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.models import COMPILED, Cell, Worker, heard, rate_of, seconds_to_prepare, start, take_turns
from benchmarks.gpu.record import Record, results_of
from benchmarks.gpu.steps.batches import BATCHES, KINDS, SIZES
from benchmarks.gpu.steps.contestant import GRAPHS, LAYERS_OP, ONE_OP, OP_BY_OP, PROFILE, StepSubject
from benchmarks.gpu.steps.replays import CHECKS, Setting
from benchmarks.gpu.subject import FIELDS

CONTESTANTS = (OP_BY_OP, ONE_OP, GRAPHS, "transformers-sdpa", COMPILED)
CHECK_SECONDS, ROUNDS = 180, 5
SHARE = 0.45  # of the seconds left, until the last one must be prepared
CHECK_NAMES = {"capture": "graphs against the steps themselves, bit for bit", "loop": "steps against a plain loop"}
Results = dict[str, dict[str, Any]]  # by contestant


def run_part(record: Record) -> None:
    """The part `steps`."""
    for check, name in CHECK_NAMES.items():
        record.run(name, partial(checked, record, check))
    done = {name for name, entry in record.entries.items() if "failed" not in entry}
    asked = [batch for batch in BATCHES if batch not in done]
    if asked:
        contest(record, asked)
    results = {batch: record.entries[batch]["results"] for batch in BATCHES if "results" in record.entries[batch]}
    record.add("all sizes", {"numbers": summary(results), "unit": "tokens/s"})
    record.figures = dict(figures(results))


def checked(record: Record, check: str) -> dict[str, Any]:
    if record.smoke:
        return CHECKS[check](Setting(record.device, record.smoke))
    command = [sys.executable, "-m", "benchmarks.gpu.steps.replays", check]
    found, died = results_of(command, min(CHECK_SECONDS, record.left))
    return found[0] if found else {"failed": died or "it said nothing"}


def contest(record: Record, batches: list[str]) -> None:
    """An entry for each batch: {"results": {contestant: figures, or why there are none}}."""
    cell = Cell("tiny-words" if record.smoke else "bert-base", "training", "amp")
    names = [name for name in CONTESTANTS if name != COMPILED or not record.smoke]
    left, workers = record.left, dict[str, Worker]()
    for name in names:
        # Ours begin with the largest: a peer takes all of the memory for it where that is too little.
        order = batches[::-1] if name.startswith("fastbert") else batches
        limit = seconds_to_prepare(name, SHARE, left)
        workers[name] = start(cell, name, limit, record.smoke, order, StepSubject)
    try:
        ready = {name: heard(name, worker, batches) for name, worker in workers.items()}
        for batch in batches:
            here = {name: dict(found[batch]) for name, found in ready.items()}
            record.run(batch, partial(run_batch, record, cell, workers, here, batch))
    finally:
        for worker in workers.values():
            worker.close()


def run_batch(record: Record, cell: Cell, workers: dict[str, Worker], here: Results, batch: str) -> dict[str, Any]:
    """All take turns; then each one's launches and gaps."""
    for name, answers in take_turns(workers, here, batch, 1 if record.smoke else ROUNDS).items():
        host = sorted(answer["host_seconds"] for answer in answers)
        here[name] |= rate_of(here[name]["tokens"], answers) | {"host_seconds": host[len(host) // 2]}
    for name, profiled in take_turns(workers, here, f"{PROFILE}{batch}", 1).items():
        here[name]["profile"] = profiled[0]
    return entry_of(here, FIELDS[cell.model]["num_hidden_layers"])


def entry_of(results: Results, num_layers: int) -> dict[str, Any]:
    """A batch's entry: it fails where one of ours has no figure; a peer that has no figure says why and no more."""
    numbers: dict[str, dict[str, float | str]] = {name: row_of(result) for name, result in results.items()}
    entry: dict[str, Any] = {"numbers": numbers, "results": results, "unit": "a step"}
    one_op = results[ONE_OP]
    if "tokens" in one_op and one_op["layers_in_one_op"] < num_layers:
        entry["note"] = f"no op ran all {num_layers} layers for {ONE_OP}: {LAYERS_OP}: {one_op['layers_op']}"
    late = [name for name, row in numbers.items() if name.startswith("fastbert") and "ms" not in row]
    if late:
        entry["failed"] = "; ".join(f"{name}: {numbers[name]['tokens/s']}" for name in late)
    return entry


def row_of(result: dict[str, Any]) -> dict[str, float | str]:
    if "profile" not in result:
        return {"tokens/s": next((f"{kind}: {result[kind]}" for kind in ("failed", "skipped") if kind in result), "")}
    profiled = result["profile"]
    row = {
        "tokens/s": result["tokens_per_second"],
        "ms": 1e3 * result["timing"]["median"],
        "host ms": 1e3 * result["host_seconds"],
        "busy ms": profiled["busy ms"],
        "share of gaps": profiled["share of gaps"],
        "launches": profiled["launches"],
        "host launches": profiled["host launches"],
    }
    if result["peak_memory"]:
        row["peak GB"] = result["peak_memory"] / 1e9
    if "layers_in_one_op" in result:
        row["layers in one op"] = result["layers_in_one_op"]
    return row


def summary(results: dict[str, Results]) -> dict[str, dict[str, float]]:
    """Tokens/s of all batches, in the order of their sizes."""
    rows: dict[str, dict[str, float]] = {name: {} for name in CONTESTANTS}
    for kind in KINDS:
        for size in sorted(SIZES, key=lambda size: SIZES[size]):
            for name, result in results.get(f"{size} {kind}", {}).items():
                if "tokens_per_second" in result:
                    rows[name][f"{size} {kind}"] = result["tokens_per_second"]
    return {name: row for name, row in rows.items() if row}


def figures(results: dict[str, Results]) -> Iterator[tuple[str, float]]:
    """What targets are set for: of graphs, and of several sizes or kinds the least."""
    rates = {
        (batch, name): result["tokens_per_second"]
        for batch, found in results.items()
        for name, result in found.items()
        if "tokens_per_second" in result
    }
    for figure, sizes in (("steps_from_16k", ("16k", "64k")), ("steps_4k", ("4k",))):
        asked = [rates.get((f"{size} {kind}", GRAPHS)) for size in sizes for kind in KINDS]
        if all(asked):
            yield figure, min(rate for rate in asked if rate)
    for kind in KINDS:
        batches = [f"{size} {kind}" for size in SIZES]
        both = [batch for batch in batches if {(batch, GRAPHS), (batch, COMPILED)} <= rates.keys()]
        if both:
            yield f"steps_over_compile_{kind}", min(rates[batch, GRAPHS] / rates[batch, COMPILED] for batch in both)
