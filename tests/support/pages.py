"""README and the pages of docs/, and the code that stands in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}


def blocks(page: str, language: str) -> list[str]:
    """The page's blocks of code in a language, in their order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


def offline(block: str, folder: Path) -> str:
    """The block with the folder of the model that a hub id in it stands for: transformers takes no PyPI package's."""
    return block.replace('"sentence-transformers/all-MiniLM-L6-v2"', repr(str(folder)))
