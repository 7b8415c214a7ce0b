"""docs/ways/: each function that a page names is in the file that it names, and is named once."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"^( *)- `([\w.]+)` \(([\w/]+\.py)\)", re.MULTILINE)


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module, and `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


@pytest.mark.parametrize("page", ("text", "batch", "accelerated", "step", "request"))
def test_a_way_is_that_of_the_code(page):
    found = LINE.findall((ROOT / "docs" / "ways" / f"{page}.md").read_text(encoding="utf-8"))
    names = [name for _, name, _ in found]
    assert len(names) >= 15 and len(set(names)) == len(names)
    depths = [len(indent) // 2 for indent, _, _ in found]
    assert depths[0] == 0 and all(after <= before + 1 for before, after in pairwise(depths))
    for _, name, file in found:
        assert name in names_in(ROOT / "fastbert" / file), f"{name} is not in {file}"
