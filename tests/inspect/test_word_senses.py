"""The example of word senses, on the real MiniLM: the words and sentences were written before they were tried."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "word_senses.py"


def test_a_layer_tells_senses_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--page", str(tmp_path / "senses.html")])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    shares = [float(share) for share in re.findall(r"^layer +\d+: ([\d.]+)", said, re.MULTILINE)]
    assert len(shares) == 7 and max(shares) >= 0.85 and max(shares) > shares[0]
    assert len(re.findall(r"^  .+ as: .+$", said, re.MULTILINE)) == round(200 * (1 - max(shares)))
    assert (tmp_path / "senses.html").read_text(encoding="utf-8").count('"kind":"scatter"') == 20
