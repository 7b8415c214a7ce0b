"""`update_readme.py FOLDER`: results.md and results.png from results.json, and the speed in README.md and docs/."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from fastbert.bench.report import draw_chart, to_markdown

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"(<!-- speed: .*? -->\n).*?(<!-- end of speed -->)", re.DOTALL)
# README's rows: a workload of the benchmark, and what it is called there.
ROWS = {
    "1x16": "one text of 16 tokens",
    "8x128": "8 texts of 128 tokens",
    "4x512": "4 texts of 512 tokens",
    "32-ragged": "32 texts of mixed length (55 tokens on average, 167 at most)",
}
DTYPE = "bfloat16"


def rates(report: dict[str, Any], workload: str) -> tuple[float, float, float]:
    """Real tokens/s of transformers at its best, of OpenVINO, and of fastbert."""
    (row,) = (r for r in report["rows"] if (r["dtype"], r["workload"]) == (DTYPE, workload))
    by_name = {name: result["tokens_per_second"] for name, result in row["results"].items()}
    transformers = max(rate for name, rate in by_name.items() if name.startswith("transformers"))
    return transformers, by_name["openvino"], by_name["fastbert"]


def summary(report: dict[str, Any]) -> str:
    """Four rows of three numbers."""
    machine = report["machine"]
    lines = [
        f"Tokens per second of {report['model']} in {DTYPE}, {machine['threads']} threads of an {machine['cpu']},"
        f" {machine['date']}. Padding is not counted:",
        "",
        "| | transformers, compiled or not | OpenVINO | fastbert |",
        "|---|--:|--:|--:|",
    ]
    for workload, title in ROWS.items():
        transformers, openvino, ours = rates(report, workload)
        lines.append(f"| {title} | {transformers:,.0f} | {openvino:,.0f} | **{ours:,.0f}** |")
    return "\n".join(lines)


def fill(page: Path, text: str) -> None:
    """Put `text` into the page's one speed section."""
    filled, found = SECTION.subn(lambda m: f"{m[1]}{text}\n{m[2]}", page.read_text(encoding="utf-8"))
    if found != 1:
        raise SystemExit(f"{page} has {found} speed sections, not 1")
    page.write_text(filled, encoding="utf-8")


def main(folder: Path) -> None:
    report = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    table, chart = to_markdown(report), folder / "results.png"
    (folder / "results.md").write_text(table + "\n", encoding="utf-8")
    draw_chart(report, chart)
    image = f"![real tokens per second as bars]({chart.resolve().relative_to(ROOT)})"
    fill(ROOT / "README.md", f"{summary(report)}\n\n{image}")
    fill(ROOT / "docs" / "speed.md", table)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
