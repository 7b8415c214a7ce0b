"""Results from what the processes answered, and the files of a run."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fastbert.bench.compete import Say
from fastbert.bench.report import ceiling_of, why_missing, write_report
from fastbert.bench.timing import Timing
from fastbert.config import EncoderConfig
from fastbert.config.operations import operations

Answers = list[dict[str, Any]]


def latency_of(turn: str, tokens: int, answers: Answers, failure: str | None) -> dict[str, Any]:
    """One contestant's result in one kind of turn: quantiles of all its calls, in all rounds and processes."""
    starts = [answer for answer in answers if "cosines" in answer]
    failures = [start["failed"][turn] for start in starts if turn in start["failed"]]
    if failure is not None or failures:
        return {"failed": failure or failures[0]}
    seconds = [taken for answer in answers if answer.get("turn") == turn for taken in answer["seconds"]]
    p50, p99 = (float(quantile) for quantile in np.percentile(seconds, (50, 99)))
    return {
        "p50_ms": 1e3 * p50,
        "p99_ms": 1e3 * p99,
        "calls": len(seconds),
        "cosine": min(start["cosines"][turn] for start in starts),
        "tokens_per_second": tokens / p50,
    }


def bound_of(config: EncoderConfig, tokens: int, answers: Answers) -> dict[str, Any] | None:
    """The larger of what reading the layers' weights takes, and their operations at the best rate of products."""
    reads = [answer["read_seconds"] for answer in answers if "read_seconds" in answer]
    ceiling = ceiling_of([answer["gflops"] for answer in answers if "gflops" in answer])
    if not reads or ceiling is None:
        return None
    times = {
        "bytes": 1e3 * statistics.median(reads),
        "products": operations(config, [tokens]).executed / ceiling / 1e6,
    }
    by = max(times, key=times.__getitem__)
    return {"ms": times[by], "by": by, "bytes_ms": times["bytes"], "products_ms": times["products"], "gflops": ceiling}


def corpus_of(texts: int, tokens: int, answers: Answers, failure: str | None) -> dict[str, Any]:
    """One contestant's result with a corpus of so many texts and tokens."""
    if failure is not None:
        return {"failed": failure}
    timing = Timing.of([answer["seconds"] for answer in answers if "seconds" in answer])
    starts = [answer for answer in answers if "cosine" in answer]
    return {
        "texts_per_second": texts / timing.median,
        "tokens_per_second": tokens / timing.median,
        "cosine": min(start["cosine"] for start in starts),
        "start_seconds": statistics.median(start["start_seconds"] for start in starts),
        "peak_memory": max(answer["peak_memory"] for answer in answers if "peak_memory" in answer),
        "timing": timing.to_dict(),
    }


def short(row: dict[str, Any]) -> str:
    """A row as the line that says how the run goes."""
    said = []
    for name, result in row["results"].items():
        status = why_missing(result)
        if status:
            said.append(f"{name} {status} ({result[status]})")
        elif "p50_ms" in result:
            said.append(f"{name} {result['p50_ms']:.2f} ms")
        else:
            said.append(f"{name} {result['texts_per_second']:,.0f} texts/s")
    of = f" {row['tokens']} tokens from {row['source']}" if "tokens" in row else ""
    return f"{row['dtype']}{of}: " + ", ".join(said)


def write(output: Path | None, name: str, report: dict[str, Any], table: Callable[[dict[str, Any]], str]) -> None:
    if output is not None:
        write_report(output, name, report, table(report))


def draw(output: Path | None, name: str, report: dict[str, Any], say: Say) -> None:
    """The chart, where there is matplotlib."""
    if output is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        say("no chart: matplotlib is not installed")
        return
    from fastbert.bench.texts import charts

    {"latency": charts.latency, "corpus": charts.corpus}[name](report, output / f"{name}.png")
