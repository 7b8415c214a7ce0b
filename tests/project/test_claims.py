"""What the project says of itself holds: no speed on GPUs that no GPU has shown, no row of a table without its test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name for name in ("README.md", "pyproject.toml", "CITATION.cff", "CHANGELOG.md", "fastbert/__init__.py")
]
PAGES += sorted(ROOT.glob("docs/*.md"))
ROWS = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "ecosystem.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_no_claim_of_speed_on_gpus_before_one_was_measured(page):
    """Until a GPU has run `make gpu` and its results are here."""
    results = ROOT / "benchmarks" / "results"
    if any(path.is_dir() and re.search("nvidia|[ahb][12]00", path.name) for path in results.iterdir()):
        return
    sentences = re.split(r"(?<=[.!?:])\s|\n\n|\"\n", page.read_text(encoding="utf-8"))
    claims = r"\bfastest\b|\bfast(er)?\b[^|]*\b(on|for)\b[^|]*GPU|GPU[^|]*\btimes as fast\b"
    found = [s for s in sentences if re.search(claims, s, re.IGNORECASE) and re.search("GPU|CUDA|Triton", s)]
    assert not found


@pytest.mark.parametrize("path,name", ROWS)
def test_a_row_of_the_ecosystem_has_its_test(path, name):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE)
