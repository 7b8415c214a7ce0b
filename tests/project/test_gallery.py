"""The gallery's programs are short, stand on its page, and run on the small files of this repository."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "examples" / "gallery").glob("*.py"))
SAYS = {
    "cluster_intents": "96 texts, 9",  # so many per cent of them among their like
    "entities": "Lena Ortiz",
    "search_novels": "The breeze now freshened; the sea began to swell.",
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_they_are_short_and_on_the_page(program):
    assert len(program.read_text(encoding="utf-8").splitlines()) <= 60
    assert f"examples/gallery/{program.name})" in (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")


@pytest.mark.full
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_they_run(program, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program.name, "--picture", "picture.png"])
    runpy.run_path(str(program), run_name="__main__")
    assert SAYS[program.stem] in capfd.readouterr().out
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
