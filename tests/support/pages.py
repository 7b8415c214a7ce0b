"""README and the pages of docs/, and the code that stands in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {"README.md": (ROOT / "README.md").read_text(encoding="utf-8")}
PAGES |= {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}


def blocks(page: str, language: str) -> list[str]:
    """The page's blocks of code in a language, in their order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)
