"""The Markdown of both modes."""

from __future__ import annotations

from typing import Any

from fastbert.bench.contestants import is_ours
from fastbert.bench.report import best_peer, ratio, reasons, where, why_missing

SOURCES = {"strings": "From a string, the tokenizer included", "ids": "From token ids"}

LATENCY_LEGEND = (
    "p50 and in brackets p99 in ms, of a call with one text that gives its mean-pooled vector of length 1; of ours then"
    " times the best peer. Tokens with the special ones.",
    "Bound: what the machine allows, measured in turn with the contestants: to read the layers' weights once, which"
    " stay in the caches that they fit into (bytes), or their operations at the rate of the best matrix product"
    " (products), whichever takes longer; then how many times as long fastbert takes.",
)

CORPUS_LEGEND = (
    "All texts, the tokenizer included, to mean-pooled vectors of length 1, in batches of 32 (fastbert's are of a"
    " number of tokens). {} Tokens/s: real tokens. Cosine: to float64, lowest of the checked texts. Start: loading and"
    " the first pass over all texts. Peak: resident memory of the process."
)
_BY_TOKENS = "They are sorted by tokens, by sentence-transformers and fastembed by characters."
_BY_CHARACTERS = (
    "**Made with older loops of the other engines, which sorted by characters and so padded more**; fastbert sorts by"
    " tokens."
)


def latency(report: dict[str, Any]) -> str:
    """A table for strings and one for ids, with a row for each precision and length."""
    several = "" if report["processes"] == 1 else f", {report['processes']} processes of a contestant at once"
    lines = [f"{report['model']}, one text{several}. {where(report['machine'])}"]
    for source, title in SOURCES.items():
        rows = [row for row in report["rows"] if row["source"] == source]
        names = [name for name in report["contestants"] if any(name in row["results"] for row in rows)]
        columns = ["dtype", "tokens", *names, "bound", "fastbert / bound"]
        lines += ["", f"{title}:", "", f"| {' | '.join(columns)} |", "|---|" + "--:|" * (len(columns) - 1)]
        for row in rows:
            cells = [_time(row, name) for name in names] + _bound(row)
            lines.append(f"| {row['dtype']} | {row['tokens']} | {' | '.join(cells)} |")
    lines += [line for part in (*LATENCY_LEGEND, _cosines(report)) for line in ("", part)]
    return "\n".join([*lines, *reasons([_with_tokens(row) for row in report["rows"]])])


def _time(row: dict[str, Any], name: str) -> str:
    result = row["results"].get(name, {})
    if "p50_ms" not in result:
        return why_missing(result)
    p50, p99, times = _ms(result["p50_ms"]), _ms(result["p99_ms"]), ratio(row, name)
    if not is_ours(name):
        return f"{p50} ({p99})"
    return f"**{p50}** ({p99})" + ("" if times is None else f" {times:.2f}x {best_peer(row)}")


def _ms(value: float) -> str:
    """Three figures, or all before the point."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _bound(row: dict[str, Any]) -> list[str]:
    bound, ours = row["bound"], row["results"].get("fastbert", {})
    if bound is None:
        return ["", ""]
    return [f"{_ms(bound['ms'])} {bound['by']}", f"{ours['p50_ms'] / bound['ms']:.2f}" if "p50_ms" in ours else ""]


def _cosines(report: dict[str, Any]) -> str:
    """The lowest of each contestant, over lengths."""
    lowest: dict[str, dict[str, float]] = {}
    for row in report["rows"]:
        of_dtype = lowest.setdefault(row["dtype"], {})
        for name, result in row["results"].items():
            if "cosine" in result:
                of_dtype[name] = min(result["cosine"], of_dtype.get(name, 1.0))
    said = (f"{dtype} " + ", ".join(f"{n} {cosine:.4f}" for n, cosine in of.items()) for dtype, of in lowest.items())
    return f"Cosine to float64, lowest of the checked texts: {'; '.join(said)}."


def _with_tokens(row: dict[str, Any]) -> dict[str, Any]:
    """The row with failures that name their length; a skipped contestant is skipped at all of them."""
    results = {
        f"{name}, {row['tokens']} tokens from {row['source']}," if "failed" in result else name: result
        for name, result in row["results"].items()
    }
    return {**row, "results": results}


def corpus(report: dict[str, Any]) -> str:
    """A row for each precision and contestant, the fastest first."""
    columns = ("dtype", "contestant", "texts/s", "tokens/s", "times the best peer", "cosine", "start, s", "peak, MiB")
    lines = [
        f"{report['model']}, {report['texts']:,} texts of {report['tokens'] / report['texts']:.1f} tokens on average,"
        f" {report['longest']} at most. {where(report['machine'])}",
        "",
        f"| {' | '.join(columns)} |",
        "|---|---|" + "--:|" * (len(columns) - 2),
    ]
    for row in report["rows"]:
        for name in sorted(row["results"], key=lambda name: -row["results"][name].get("tokens_per_second", 0.0)):
            lines.append(f"| {row['dtype']} | {name} | {' | '.join(_rates(row, name))} |")
    legend = CORPUS_LEGEND.format(_BY_TOKENS if report.get("sorted_by") == "tokens" else _BY_CHARACTERS)
    return "\n".join([*lines, "", legend, *reasons(report["rows"])])


def _rates(row: dict[str, Any], name: str) -> list[str]:
    result, times = row["results"][name], ratio(row, name)
    if "texts_per_second" not in result:
        return [why_missing(result), *[""] * 5]
    bold = "**" if is_ours(name) else ""
    return [
        f"{bold}{result['texts_per_second']:,.1f}{bold}",
        f"{result['tokens_per_second']:,.0f}",
        f"{times:.2f}x {best_peer(row)}" if is_ours(name) and times is not None else "",
        f"{result['cosine']:.4f}",
        f"{result['start_seconds']:.1f}",
        f"{result['peak_memory'] / 2**20:,.0f}",
    ]
