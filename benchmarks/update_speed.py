"""`update_speed.py FOLDER`: results.md and results.png from results.json, and the table in docs/speed.md."""

import json
import re
import sys
from pathlib import Path

from fastbert.bench.report import draw_chart, to_markdown

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"(<!-- speed: .*? -->\n).*?(<!-- end of speed -->)", re.DOTALL)


def main(folder: Path) -> None:
    report = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    table, page = to_markdown(report), ROOT / "docs" / "speed.md"
    (folder / "results.md").write_text(table + "\n", encoding="utf-8")
    draw_chart(report, folder / "results.png")
    filled, found = SECTION.subn(lambda m: f"{m[1]}{table}\n{m[2]}", page.read_text(encoding="utf-8"))
    if found != 1:
        raise SystemExit(f"{page} has {found} speed sections, not 1")
    page.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
