"""What runs of training begin with."""

from __future__ import annotations

import pytest

from fastbert.training import run


@pytest.fixture
def chart() -> None:
    """Asked for by tests whose runs leave chart.png."""


@pytest.fixture(autouse=True)
def no_charts(request, monkeypatch):
    """To draw one takes four fifths of a tiny run."""
    if "chart" not in request.fixturenames:
        monkeypatch.setattr(run, "draw_chart", lambda folder: None)
