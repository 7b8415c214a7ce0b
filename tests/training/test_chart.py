"""The picture that a run leaves."""

from __future__ import annotations

import json

import numpy as np
import pytest
from full import left_to_full

from fastbert.training.report import draw_chart


def row(step: int, losses: list[float], **metrics: float) -> dict:
    return {"step": step, "loss": sum(losses) / len(losses), "losses": losses, **metrics}


RUNS = {
    "no evaluation": [row(2, [3.0, 2.0]), row(4, [1.5, 1.0])],
    "one evaluation": [row(2, [3.0, 2.0]), row(4, [1.5, 1.0], eval_accuracy=0.75)],
    "one step": [row(1, [3.0], eval_accuracy=0.75)],
    "several": [row(2, [3.0, 2.0], eval_accuracy=0.5), row(4, [1.5, 1.0], eval_accuracy=0.75)],
}


@left_to_full(lambda p: p["name"] in ("no evaluation", "several"))  # one panel, and two, with lines
@pytest.mark.parametrize("name", RUNS)
def test_every_point_is_seen_and_steps_are_whole(name, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (figures.append(figure), save(figure, *a, **k)))
    rows = RUNS[name]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    draw_chart(tmp_path)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    panels = figures[0].axes
    assert len(panels) == 1 + any("eval_accuracy" in entry for entry in rows)
    for panel in panels:
        low, high = panel.get_xlim()
        ticks = [tick for tick in panel.get_xticks() if low <= tick <= high]
        assert ticks and np.array_equal(ticks, np.round(ticks))
        assert len(panel.get_xticklabels()) == len(set(text.get_text() for text in panel.get_xticklabels()))
        for line in panel.lines:
            assert len(line.get_xdata()) > 1 or line.get_marker() == "o"
            assert low <= min(line.get_xdata()) and max(line.get_xdata()) <= high
