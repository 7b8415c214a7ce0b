"""`fastbert bench --latency`: what one text takes, beside other engines and what the machine allows."""

from __future__ import annotations

import tempfile
from typing import Any

from fastbert.bench.compete import Say, compete, machine_of
from fastbert.bench.texts import report, tables
from fastbert.bench.texts.contestants import CONTESTANTS
from fastbert.bench.texts.run import PACKAGES, WORKER, Steps, TextSettings

LENGTHS = (8, 16, 32, 64, 128, 250, 512)  # tokens, special ones included
BOUND = "bound"


def run(settings: TextSettings, say: Say) -> dict[str, Any]:
    """Measure every precision and length; latency.json, latency.md and latency.png in `settings.output`.

    latency.json is written after every precision. Raises BenchmarkError.
    """
    summary: dict[str, Any] = {
        "machine": machine_of(settings.threads, PACKAGES),
        "model": settings.source.name,
        "contestants": list(settings.contestants),
        "rounds": settings.rounds,
        "restarts": settings.restarts,
        "processes": settings.processes,
        "rows": [],
    }
    with tempfile.TemporaryDirectory(prefix="fastbert-bench-") as folder:
        steps = Steps(settings, folder, False, say)
        for precision in settings.precisions:
            rows = _rows(steps, precision)
            summary["rows"] += rows
            for row in rows:
                say(report.short(row))
            report.write(settings.output, "latency", summary, tables.latency)
    report.draw(settings.output, "latency", summary, say)
    return summary


def _rows(steps: Steps, precision: str) -> list[dict[str, Any]]:
    settings = steps.settings
    tasks, results = steps.contestants(precision, "latency", lengths=settings.lengths)
    steps.say(f"{precision}: {', '.join(tasks)}")
    with_ids = [name for name in tasks if CONTESTANTS[name].has_ids]
    turns = {"bytes": [BOUND], "products": [BOUND]}
    for length in settings.lengths:
        turns |= {f"strings {length}": list(tasks), f"ids {length}": with_ids}
    tasks[BOUND] = steps.task(BOUND, precision=precision, weights=settings.source.weights)
    answers, failures = compete(
        tasks, settings.rounds, settings.restarts, turns=turns, processes=settings.processes, module=WORKER
    )
    if BOUND in failures:
        steps.say(f"warning: the shortest possible time in {precision} was not measured: {failures[BOUND]}")
    bounds = [] if BOUND in failures else answers[BOUND]
    rows = []
    for source in ("strings", "ids"):
        for length in settings.lengths:
            of_row = {
                name: result or report.latency_of(f"{source} {length}", length, answers[name], failures.get(name))
                for name, result in results.items()
                if source == "strings" or CONTESTANTS[name].has_ids
            }
            rows.append(
                {"dtype": precision, "tokens": length, "source": source, "results": of_row}
                | {"bound": report.bound_of(settings.source.config, length, bounds)}
            )
    return rows
