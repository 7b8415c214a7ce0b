"""Write README's speed table, results.md and results.png from results.json: `update_readme.py FOLDER`."""

import json
import re
import sys
from pathlib import Path

from fastbert.bench.report import draw_chart, to_markdown

ROOT = Path(__file__).resolve().parents[1]
SPEED = re.compile(r"(<!-- speed: .*? -->\n).*?(\n<!-- end of speed -->)", re.DOTALL)


def main(folder: Path) -> None:
    report = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    table, chart = to_markdown(report), folder / "results.png"
    (folder / "results.md").write_text(table + "\n", encoding="utf-8")
    draw_chart(report, chart)
    image = f"![real tokens/s as bars]({chart.resolve().relative_to(ROOT)})"
    readme = ROOT / "README.md"
    text, found = SPEED.subn(lambda m: f"{m[1]}{table}\n\n{image}{m[2]}", readme.read_text(encoding="utf-8"))
    if found != 1:
        raise SystemExit(f"{readme} has {found} speed sections, not 1")
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
