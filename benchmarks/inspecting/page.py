"""How soon a page of attention maps is ready, and answers: 12 layers of 12 heads, in Chromium.

    PYTHONPATH=tests/support python -m benchmarks.inspecting.page --output benchmarks/results/<machine>

From the command to open the file until all is drawn, the median of some loads, each of a new process's first page; and
what a click on a token or on a head's picture takes, with the layout that follows.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from browser import tab

from fastbert import inspect
from fastbert.bench.report import write_report
from fastbert.bench.timing import describe_machine

LAYERS, HEADS, LENGTHS, CLICKS = 12, 12, (64, 512), 40
CLICK = """(() => {
  const found = [], all = name => [...document.querySelectorAll(name)];
  const buttons = [...all('.tokens button'), ...all('.heads button')];
  for (let i = 0; i < CLICKS; i++) {
    const button = buttons[(i * 37) % buttons.length], start = performance.now();
    button.click();
    document.body.offsetHeight;
    found.push(performance.now() - start);
  }
  return found;
})()"""


def measure(length: int, loads: int) -> dict[str, Any]:
    maps = (3 * torch.randn(LAYERS, HEADS, length, length)).softmax(-1)
    page = inspect.Page("Inside a model", "of twelve layers")
    tokens = [f"word{i}" for i in range(length)]
    page.add_attention(tokens, inspect.AttentionMaps(tuple(range(LAYERS)), tuple(range(HEADS)), (maps,)))
    seconds, clicks = [], list[float]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "page.html"
        page.write(path)
        for i in range(loads):
            with tab(Path(folder) / f"browser{i}") as browser:
                browser.look(1200, 800, "light")
                start = time.perf_counter()
                browser.open(path)
                seconds.append(time.perf_counter() - start)
                clicks += browser.run(CLICK.replace("CLICKS", str(CLICKS)))
        size = path.stat().st_size
    slow = statistics.quantiles(clicks, n=20)[-1]
    return {"bytes": size, "ready_seconds": statistics.median(seconds), "click_ms_p95": slow}


def to_markdown(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        f"{LAYERS} layers of {HEADS} heads, Chromium, medians of {report['loads']} loads; {machine['cpu']},"
        f" {machine['threads']} threads, commit {machine['commit']}, {machine['date']}.",
        "",
        "| tokens | MB | from opening to drawn, s | a click, ms (95th percentile) |",
        "|--:|--:|--:|--:|",
    ]
    for length, row in report["rows"].items():
        size, ready, click = row["bytes"] / 1e6, row["ready_seconds"], row["click_ms_p95"]
        lines.append(f"| {length} | {size:.1f} | {ready:.2f} | {click:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a folder for page.json and page.md")
    options = parser.parse_args()
    rows = {str(length): measure(length, options.loads) for length in LENGTHS}
    report = {"machine": describe_machine(), "loads": options.loads, "rows": rows}
    print(to_markdown(report))
    if options.output is not None:
        write_report(options.output, "page", report, to_markdown(report))


if __name__ == "__main__":
    main()
