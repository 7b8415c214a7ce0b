"""The charts of both modes; they need matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastbert.bench.contestants import is_ours
from fastbert.bench.report import CHART_GROUPS, ratio
from fastbert.files import writing

# A line is the best of the contestants whose names begin so; fastbert, which comes last, alone is a name. Its label,
# colour and marker.
LINES = {
    "sentence-transformers": ("sentence-transformers", CHART_GROUPS["transformers"][1], "s"),
    "onnxruntime": ("ONNX Runtime", CHART_GROUPS["onnxruntime"][1], "^"),
    "openvino": ("OpenVINO (in int8 the better of two)", CHART_GROUPS["openvino"][1], "D"),
    "fastbert": ("fastbert", CHART_GROUPS["fastbert"][1], "o"),
}
BARS = {"ctranslate2": "#CC79A7", "fastembed": "#009E73"}  # contestants without a line, in colours of the same list
TEXT, GRID = "#333333", "#dddddd"


def line_of(rows: Iterable[dict[str, Any]], group: str) -> tuple[list[int], list[float]]:
    """(tokens, p50 in ms) of the best of a group, where it has a time."""
    tokens, times = [], []
    for row in rows:
        names = [group] if group == "fastbert" else [name for name in row["results"] if name.startswith(group)]
        medians = [row["results"][name]["p50_ms"] for name in names if "p50_ms" in row["results"].get(name, {})]
        if medians:
            tokens.append(row["tokens"])
            times.append(min(medians))
    return tokens, times


def latency(report: dict[str, Any], path: Path) -> None:
    """A panel a precision: p50 from a string, over tokens, both in logarithms, above what the machine allows."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in report["rows"]))
    figure, panels = _figure((1.2 + 3.6 * len(dtypes), 4.6), 1, len(dtypes), sharey=True)
    shown: dict[str, Any] = {}
    for axes, dtype in zip(panels[0], dtypes, strict=True):
        rows = [row for row in report["rows"] if (row["dtype"], row["source"]) == (dtype, "strings")]
        for group, (label, colour, marker) in LINES.items():
            tokens, times = line_of(rows, group)
            if not times:
                continue
            own = {"linewidth": 2.4, "zorder": 4} if group == "fastbert" else {"linewidth": 1.5, "zorder": 3}
            (shown[label],) = axes.plot(tokens, times, marker=marker, markersize=5, color=colour, **own)
        bounds = [(row["tokens"], row["bound"]["ms"]) for row in rows if row["bound"] is not None]
        if bounds:
            (shown["bound: weights read once, or products"],) = axes.plot(
                *zip(*bounds, strict=True), "--", color=TEXT, linewidth=1.2, zorder=2
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([row["tokens"] for row in rows], [str(row["tokens"]) for row in rows])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(_one_two_five())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(dtype, loc="left", fontsize=11, fontweight="bold")
        axes.set_xlabel("tokens")
        axes.grid(color=GRID, linewidth=0.8, zorder=0)
    panels[0][0].set_ylabel("p50 of a call with one text, ms")
    _finish(figure, report, f"{report['model']}, one string to its vector", path, shown)


def _one_two_five() -> Any:
    from matplotlib.ticker import LogLocator

    return LogLocator(subs=(1, 2, 5))


def corpus(report: dict[str, Any], path: Path) -> None:
    """A panel a precision, a bar a contestant, the fastest above."""
    rows = [
        (row, {name: result for name, result in row["results"].items() if "texts_per_second" in result})
        for row in report["rows"]
    ]
    heights = [max(1, len(timed)) for _, timed in rows]
    figure, panels = _figure(
        (8.5, 1.1 + sum(0.34 * height + 0.5 for height in heights)),
        len(rows),
        1,
        sharex=True,
        gridspec_kw={"height_ratios": heights},
    )
    for axes, (row, timed) in zip(panels[:, 0], rows, strict=True):
        names = sorted(timed, key=lambda name: timed[name]["texts_per_second"])
        rates = [timed[name]["texts_per_second"] for name in names]
        bars = axes.barh(names, rates, color=[_colour(name) for name in names], height=0.72, zorder=2)
        labels = [f"{rate:,.0f}{_times(row, name)}" for name, rate in zip(names, rates, strict=True)]
        for label, name in zip(axes.bar_label(bars, labels, padding=4, fontsize=9), names, strict=True):
            label.set_fontweight("bold" if name == "fastbert" else "normal")
        axes.set_title(row["dtype"], loc="left", fontsize=11, fontweight="bold")
        axes.grid(axis="x", color=GRID, linewidth=0.8, zorder=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.margins(x=0.42)  # for the labels
    panels[-1, 0].set_xlabel("texts/s")
    mean = report["tokens"] / report["texts"]
    _finish(figure, report, f"{report['model']}, {report['texts']:,} texts of {mean:.0f} tokens on average", path)


def _colour(name: str) -> str:
    return next((colour for group, (_, colour, _) in LINES.items() if name.startswith(group)), BARS.get(name, TEXT))


def _times(row: dict[str, Any], name: str) -> str:
    times = ratio(row, name) if is_ours(name) else None
    return "" if times is None else f"  ({times:.2f}x the best peer)"


def _figure(size: tuple[float, float], rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in panels.flat:
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0)
    return figure, panels


def _finish(figure: Any, report: dict[str, Any], title: str, path: Path, shown: dict[str, Any] | None = None) -> None:
    machine = report["machine"]
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] > 1 else "")
    figure.suptitle(f"{title}: {machine['cpu']}, {threads}", fontsize=11)
    if shown:
        labels = sorted(shown, key=lambda label: label != LINES["fastbert"][0])  # ours first
        handles = [shown[label] for label in labels]
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    with writing(path) as new:
        figure.savefig(new, dpi=150, format="png")
