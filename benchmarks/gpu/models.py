"""Whole encoders on a GPU, ours beside transformers': forward and training step in real tokens/s, and peak memory.

Every contestant has a process of its own (subject.py). They prepare themselves beside each other, since that is the
compiler's time, and are timed in turn. Padding is no token.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.gpu.record import Record
from benchmarks.gpu.subject import BATCHES, CONTESTANTS, TIME_LIMIT, Subject, prepared
from fastbert.bench.compete import ContestantProcess, WorkerError
from fastbert.bench.timing import Timing

ROUNDS = 5
OURS, COMPILED = "fastbert", "transformers-compile"


@dataclass(frozen=True)
class Cell:
    model: str
    mode: str  # forward or training
    precision: str  # bf16, or amp: fp32 weights under autocast to bf16

    @property
    def id(self) -> str:
        return f"{self.mode} {self.model} {self.precision}"


FORWARD = tuple(Cell(model, "forward", "bf16") for model in ("bert-base", "bert-large", "minilm"))
TRAINING = tuple(Cell(model, "training", "amp") for model in ("bert-base", "minilm", "bert-large"))
MODERN = tuple(Cell("modernbert-base", mode, kind) for mode, kind in (("forward", "bf16"), ("training", "amp")))
# Cells of one group prepare themselves beside each other: as many as the GPU's memory holds. (Share of the seconds left
# until the last one must be ready, cells): the turns take the others.
GROUPS = (
    (0.5, (*FORWARD, *MODERN[:1], *TRAINING[:2])),
    (0.75, TRAINING[2:]),
    (0.75, MODERN[1:]),
)
SMOKE_GROUPS = tuple(
    (0.5, (Cell(model, "forward", "bf16"), Cell(model, "training", "amp"))) for model in ("tiny", "tiny-modernbert")
)
# Seconds to prepare, however many are left. torch.compile has a budget of its own, which the others do not wait for
# beyond its end; what Inductor has compiled by then is on disk, so the next command goes on from there.
LONGEST, LONGEST_COMPILED = 120, 300
MEMORY_CELLS = ("training bert-base amp", "training bert-large amp")


class Local:
    """A contestant in this process, for smoke tests: starting one takes longer than what it does."""

    def __init__(self, task: dict[str, Any], kind: type[Subject]):
        self.subject: Subject | None
        self.subject, self.found = prepared(task, kind)

    def answer(self) -> dict[str, Any]:
        return self.found

    def ask(self, what: str) -> dict[str, Any]:
        assert self.subject is not None
        return self.subject.turn(what)

    def close(self) -> None:
        self.subject = None


def seconds_to_prepare(contestant: str, share: float, left: float) -> int:
    return int(min(LONGEST_COMPILED if contestant == COMPILED else LONGEST, share * left))


Worker = ContestantProcess | Local


def start(cell: Cell, contestant: str, limit: int, smoke: bool, batches: Sequence[str], kind: type[Subject]) -> Worker:
    """A contestant, by the module of its `kind`, which prepares itself for the batches. `heard` has its answer."""
    threads = max(1, min(4, (os.cpu_count() or 1) // 3))
    task = {"threads": threads, "contestant": contestant, "limit": limit, "smoke": smoke, "batches": list(batches)}
    task |= {"model": cell.model, "mode": cell.mode, "precision": cell.precision}
    return Local(task, kind) if smoke else ContestantProcess(task, kind.__module__)


def heard(contestant: str, worker: Worker, batches: Sequence[str]) -> dict[str, Any]:
    """{batch: what it has prepared, or why nothing}."""
    try:
        return worker.answer()
    except WorkerError as error:
        is_late = str(error).startswith(TIME_LIMIT) and not contestant.startswith(OURS)
        return {batch: {"skipped" if is_late else "failed": str(error)} for batch in batches}


def take_turns(
    workers: Mapping[str, Worker], here: dict[str, dict[str, Any]], asked: str, rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """The answers to `asked` of those that are prepared for it; `here` says so, and gets why one has none."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in here if "tokens" in here[name]}
    for _ in range(rounds):
        for name in list(answers):
            try:
                answers[name].append(workers[name].ask(asked))
            except WorkerError as error:
                here[name] = {"failed": str(error)}
                del answers[name]
    return answers


def rate_of(tokens: int, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    timing = Timing.of([answer["seconds"] for answer in answers])
    return {"tokens_per_second": tokens / timing.median, "timing": timing.to_dict()}


def contestants(cell: Cell, smoke: bool) -> tuple[str, ...]:
    """Compiling takes long: not in smoke tests, and not where no target asks for it."""
    is_compiled = not smoke and cell not in (TRAINING[1], *MODERN)
    return tuple(name for name in CONTESTANTS if name != COMPILED or is_compiled)


def run_group(record: Record, share: float, cells: tuple[Cell, ...], rounds: int) -> None:
    """Entries of cells: {"results": {batch: {contestant: figures, or why there are none}}}."""
    limits = {name: seconds_to_prepare(name, share, record.left) for name in CONTESTANTS}
    asked = [(cell, name) for cell in cells for name in contestants(cell, record.smoke)]
    workers = {(cell, name): start(cell, name, limits[name], record.smoke, BATCHES, Subject) for cell, name in asked}
    try:
        ready = {key: heard(key[1], worker, BATCHES) for key, worker in workers.items()}
        for cell in cells:
            record.run(cell.id, partial(run_cell, cell, workers, ready, rounds))
    finally:
        for worker in workers.values():
            worker.close()


def run_cell(
    cell: Cell,
    workers: dict[tuple[Cell, str], Worker],
    ready: dict[tuple[Cell, str], dict[str, Any]],
    rounds: int,
) -> dict[str, Any]:
    results: dict[str, dict[str, Any]] = {}
    for batch in BATCHES:
        here = {name: dict(found[batch]) for (of, name), found in ready.items() if of == cell}
        for name, answers in take_turns({name: workers[cell, name] for name in here}, here, batch, rounds).items():
            here[name] |= rate_of(here[name]["tokens"], answers)
        results[batch] = here
    return entry_of(results)


def entry_of(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A cell's entry: it fails where ours does; a peer that has no figure says why and no more."""
    numbers: dict[str, dict[str, float | str]] = {}
    for batch, found in results.items():
        base = found[OURS].get("tokens_per_second")
        for name, result in found.items():
            row = numbers.setdefault(name, {})
            rate, peak = result.get("tokens_per_second"), result.get("peak_memory")
            row[f"{batch}, tokens/s"] = rate or next(
                (f"{k}: {result[k]}" for k in ("failed", "skipped") if k in result), ""
            )
            if rate and base and name != OURS:
                row[f"{batch}, ours over it"] = base / rate
            if peak:
                row[f"{batch}, peak GB"] = peak / 1e9
    entry: dict[str, Any] = {"numbers": numbers, "results": results}
    failed = [f"{batch}: {found[OURS]['failed']}" for batch, found in results.items() if "failed" in found[OURS]]
    if failed:
        entry["failed"] = "; ".join(failed)
    return entry


def rate(entry: dict[str, Any], batch: str, contestant: str) -> float | None:
    found: float | None = entry.get("results", {}).get(batch, {}).get(contestant, {}).get("tokens_per_second")
    return found


def run_part(record: Record) -> None:
    """The part `models`."""
    for share, cells in SMOKE_GROUPS if record.smoke else GROUPS:
        done = {name for name, entry in record.entries.items() if "failed" not in entry}
        asked = tuple(cell for cell in cells if cell.id not in done)
        if asked:
            run_group(record, share, asked, 1 if record.smoke else ROUNDS)
    record.figures = dict(figures(record.entries)) | memory_figures(record.entries)


def figures(entries: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """What targets are set for: training with fp32 weights, and of the ratios the smaller one of base and large."""
    for mode, precision in (("forward", "bf16"), ("training", "amp")):
        for batch in BATCHES:
            ratios = []
            for model in ("bert-base", "bert-large"):
                entry = entries.get(f"{mode} {model} {precision}", {})
                ours, peer = rate(entry, batch, OURS), rate(entry, batch, COMPILED)
                if ours and batch == "full":
                    yield f"{mode}_{model}", ours
                if ours and peer:
                    ratios.append(ours / peer)
            if ratios:
                yield f"{mode}_over_compile_{batch}", min(ratios)


def memory_figures(entries: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Peaks of a training step, ours over the least of the others: the larger ratio of base and large."""
    ratios = []
    for name in MEMORY_CELLS:
        found = entries.get(name, {}).get("results", {}).get("full", {})
        peaks = {contestant: result.get("peak_memory") for contestant, result in found.items()}
        theirs = [peaks[peer] for peer in peaks if peer != OURS and peaks[peer]]
        if peaks.get(OURS) and theirs:
            ratios.append(peaks[OURS] / min(theirs))
    return {"training_memory_ratio": max(ratios)} if ratios else {}
