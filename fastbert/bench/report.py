"""The report of `fastbert bench`: rates, ratios, shares of the ceiling, a Markdown table and a chart."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from fastbert.bench.contestants import is_ours
from fastbert.bench.jobs import fields_without_type
from fastbert.bench.timing import Timing
from fastbert.config import EncoderConfig
from fastbert.config.operations import Operations, operations
from fastbert.files import write_text, writing
from fastbert.testing.cases import MODELS, Workload

CHART_GROUPS = {  # what a contestant's name begins with: label and colour (Okabe and Ito's, safe for the colour-blind)
    "transformers": ("transformers (best of eager, sdpa, compile)", "#999999"),
    "onnxruntime": ("ONNX Runtime", "#E69F00"),
    "openvino": ("OpenVINO (in int8 the better of two)", "#56B4E9"),
    "fastbert": ("fastbert", "#0072B2"),
}

MISSING = ("skipped", "failed")  # what a result has instead of a time, with the reason

LEGEND = (
    "In brackets: times the best peer at that precision, and the share of the ceiling, which is the best GEMM of this",
    "machine, measured in turn with the contestants. Cosine: to float64, lowest over the batches. Start: from imports",
    "(torch's own apart) to the first output, median. Peak: resident memory of the process, highest over the batches.",
)


def write_report(folder: Path, name: str, report: dict[str, Any], page: str) -> None:
    """`folder`/name.json with all figures and name.md with the page that is read. Makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{name}.json", json.dumps(report, indent=1) + "\n")
    write_text(folder / f"{name}.md", page + "\n")


def operations_of(model: str, workload: Workload) -> Operations:
    """Those of one batch's real tokens."""
    fields = MODELS[model]
    config = EncoderConfig.of_family(fields.get("model_type", "bert"), **fields_without_type(fields))
    return operations(config, workload.lengths)


def ceiling_of(rounds: list[list[float]]) -> float | None:
    """GFLOP/s: the median over the rounds of every shape, and of those the best; None without rounds."""
    return max(statistics.median(shape) for shape in zip(*rounds, strict=True)) if rounds else None


def result_of(model: str, workload: Workload, ceiling: float | None, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One contestant's result from what its processes answered: one start each, and one timing a round."""
    timing = Timing.of([answer["seconds"] for answer in answers if "seconds" in answer])
    starts = [answer for answer in answers if "cosine" in answer]
    gflops = operations_of(model, workload).executed / timing.median / 1e9
    return {
        "tokens_per_second": sum(workload.lengths) / timing.median,
        "gflops": gflops,
        "share_of_ceiling": gflops / ceiling if ceiling else None,
        "cosine": min(start["cosine"] for start in starts),
        "start_seconds": statistics.median(start["start_seconds"] for start in starts),
        "peak_memory": max(answer["peak_memory"] for answer in answers if "peak_memory" in answer),
        "timing": timing.to_dict(),
    }


def _rate(row: dict[str, Any], name: str) -> float | None:
    """Real tokens/s; None where there is no time."""
    rate: float | None = row["results"].get(name, {}).get("tokens_per_second")
    return rate


def best_peer(row: dict[str, Any]) -> str | None:
    """The fastest contestant that is not ours; None when none has a time."""
    peers = {name: rate for name in row["results"] if not is_ours(name) and (rate := _rate(row, name)) is not None}
    return max(peers, key=peers.__getitem__) if peers else None


def ratio(row: dict[str, Any], name: str) -> float | None:
    """How many times the best peer's rate; None where either has no time."""
    rate, peer = _rate(row, name), best_peer(row)
    base = _rate(row, peer) if peer else None
    return rate / base if rate and base else None


# --------------------------------------------------------------------------------------------------------------------
# Markdown


def to_markdown(report: dict[str, Any]) -> str:
    """Where it was measured, the table, and why whatever is missing is missing."""
    rows = report["rows"]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    lines = [
        f"{report['model']}, real tokens/s. {where(report['machine'])}",
        "",
        f"| dtype | contestant | {' | '.join(workloads)} | cosine | start, s | peak, MiB |",
        "|---|---|" + "--:|" * (len(workloads) + 3),
    ]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        by_workload = {row["workload"]: row for row in rows if row["dtype"] == dtype}
        for name in dict.fromkeys(name for row in by_workload.values() for name in row["results"]):
            cells = [_cell(by_workload[w], name) if w in by_workload else "" for w in workloads]
            cells += _summary([row["results"].get(name, {}) for row in by_workload.values()])
            lines.append(f"| {dtype} | {name} | " + " | ".join(cells) + " |")
        ceilings = [by_workload[w]["ceiling_gflops"] if w in by_workload else None for w in workloads]
        lines.append(
            f"| {dtype} | *ceiling, GFLOP/s* | " + " | ".join(f"*{c:,.0f}*" if c else "" for c in ceilings) + " | | | |"
        )
    return "\n".join([*lines, "", *LEGEND, *reasons(rows)])


def where(machine: dict[str, Any]) -> str:
    """The machine, the versions and the day, as a table's first line has them."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] > 1 else "")
    return (
        f"{machine['cpu']}, {threads}, {machine['cpu_capability']}, torch {machine['torch']},"
        f" {versions}; fastbert {machine['commit'] or machine['fastbert']}, {machine['date']}."
    )


def reasons(rows: list[dict[str, Any]]) -> list[str]:
    """Why whatever is missing is missing, each reason once, as lines below a table."""
    missing = dict.fromkeys(
        f"- {row['dtype']} {name} {status}: {result[status]}"
        for row in rows
        for name, result in row["results"].items()
        for status in MISSING
        if status in result
    )
    return ["", *missing] if missing else []


def why_missing(result: dict[str, Any]) -> str:
    """What a cell without a time says; empty where there is nothing at all."""
    return next((status for status in MISSING if status in result), "")


def _cell(row: dict[str, Any], name: str) -> str:
    result, rate, times = row["results"].get(name, {}), _rate(row, name), ratio(row, name)
    if rate is None:
        return why_missing(result)
    if not is_ours(name):
        return f"{rate:,.0f}"
    notes = [] if times is None else [f"{times:.2f}x {best_peer(row)}"]
    if result["share_of_ceiling"] is not None:
        notes.append(f"{result['share_of_ceiling']:.0%}")
    return f"**{rate:,.0f}**" + (f" ({', '.join(notes)})" if notes else "")


def _summary(results: list[dict[str, Any]]) -> list[str]:
    """The last three columns: lowest cosine, median start, highest peak."""
    timed = [result for result in results if "tokens_per_second" in result]
    if not timed:
        return [""] * 3
    return [
        f"{min(result['cosine'] for result in timed):.4f}",
        f"{statistics.median(result['start_seconds'] for result in timed):.1f}",
        f"{max(result['peak_memory'] for result in timed) / 2**20:,.0f}",
    ]


# --------------------------------------------------------------------------------------------------------------------
# Chart


def chart_bars(row: dict[str, Any]) -> dict[str, float]:
    """Real tokens/s of each chart group: the best of its contestants, of ours what runs by default."""
    bars = {}
    for group in CHART_GROUPS:
        names = [group] if group == "fastbert" else [name for name in row["results"] if name.startswith(group)]
        rates = [rate for name in names if (rate := _rate(row, name)) is not None]
        if rates:
            bars[group] = max(rates)
    return bars


def draw_chart(report: dict[str, Any], path: Path) -> None:
    """A panel a precision, a group of bars a batch; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dtypes = list(dict.fromkeys(row["dtype"] for row in report["rows"]))
    figure = Figure(figsize=(9, 0.9 + 2.6 * len(dtypes)), layout="constrained")
    FigureCanvasAgg(figure)
    shown: dict[str, Any] = {}
    for axes, dtype in zip(figure.subplots(len(dtypes), squeeze=False)[:, 0], dtypes, strict=True):
        rows = [row for row in report["rows"] if row["dtype"] == dtype]
        groups = [group for group in CHART_GROUPS if any(group in chart_bars(row) for row in rows)]
        width = 0.8 / max(1, len(groups))
        for i, group in enumerate(groups):
            places = [x + (i - (len(groups) - 1) / 2) * width for x in range(len(rows))]
            heights = [chart_bars(row).get(group, 0.0) for row in rows]
            label, colour = CHART_GROUPS[group]
            shown[label] = axes.bar(places, heights, width * 0.92, color=colour, zorder=2)
            times = [ratio(row, group) if group == "fastbert" else None for row in rows]
            for x, height, value in zip(places, heights, times, strict=True):
                if value is not None:
                    axes.annotate(
                        f"{value:.2f}x",
                        (x, height),
                        (0, 2),
                        textcoords="offset points",
                        ha="center",
                        fontsize=9,
                        fontweight="bold",
                    )
        axes.set_xticks(range(len(rows)), [row["workload"] for row in rows])
        axes.set_title(dtype, loc="left", fontsize=11, fontweight="bold")
        axes.set_ylabel("real tokens/s")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="y", color="#dddddd", linewidth=0.8, zorder=0)
        axes.tick_params(length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.margins(y=0.12)
    machine = report["machine"]
    figure.suptitle(
        f"{report['model']} on {machine['cpu']}, {machine['threads']} threads; above fastbert: times the best peer",
        fontsize=11,
    )
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=2, frameon=False)
    with writing(path) as new:
        figure.savefig(new, dpi=150, format="png")
