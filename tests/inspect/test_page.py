"""The page holds what it was given, as text and within its size."""

from __future__ import annotations

import base64
import html
import json
import re

import numpy as np
import pytest
import torch
from seeds import torch_generator

from fastbert import inspect
from fastbert.inspect.page import KEPT

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "&amp;",
    "\u05e9\u05dc\u05d5\u05dd",
    "\U0001f600",
    "__DATA__",
    "\u2028",
]


def maps(tokens: int, layers: int = 12, heads: int = 12) -> inspect.AttentionMaps:
    probs = (4 * torch.randn(layers, heads, tokens, tokens, generator=torch_generator(0))).softmax(-1)
    return inspect.AttentionMaps(tuple(range(layers)), tuple(range(heads)), (probs,))


def data_of(page: inspect.Page) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page.html(), re.DOTALL)[1])


def decoded(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype)


def test_hostile_text_stays_text():
    page = inspect.Page(HOSTILE[0], HOSTILE[0])
    page.add_attention(HOSTILE, maps(len(HOSTILE), 2, 2), title=HOSTILE[0])
    found = data_of(page)
    assert found["title"] == HOSTILE[0] and found["views"][0]["tokens"] == HOSTILE
    assert page.html().count("<script") == 2 and "alert(1)</" not in page.html()
    assert f"<title>{html.escape(HOSTILE[0])}</title>" in page.html()
    frame = page._repr_html_()
    assert frame.startswith('<iframe srcdoc="') and html.unescape(frame.split('"')[1]) == page.html()
    assert not re.search(r"(?:src|href)=|https?://(?!www\.w3\.org)|import ", page.html())


@pytest.mark.parametrize("tokens,limit", [(64, 3e6), pytest.param(512, 12e6, marks=pytest.mark.full)])
def test_weights_and_size(tokens, limit):
    given, page = maps(tokens), inspect.Page("a page")
    page.add_attention([f"token {i}" for i in range(tokens)], given)
    assert len(page.html().encode()) <= limit
    view, weights = data_of(page)["views"][0], given[0].numpy()
    kept = decoded(view["weights"], "u1").reshape(12, 12, tokens, -1) / 255 * view["scale"]
    if tokens == 64:
        assert np.abs(kept - weights).max() <= 0.5 / 255 + 1e-6
        return
    keys = decoded(view["keys"], "<u2").reshape(kept.shape).astype(np.int64)
    assert kept.shape[-1] == KEPT and np.abs(kept - np.take_along_axis(weights, keys, -1)).max() <= 0.5 / 255 + 1e-6
    rest = decoded(view["rest"], "u1").reshape(12, 12, tokens) / 255 * view["most"]
    most = np.partition(weights, tokens - KEPT, -1)[..., -KEPT:]
    assert np.abs(rest - (1 - most.sum(-1))).max() <= 0.5 / 255 + 1e-5
    assert "16 largest weights" in view["note"]


def test_weights_that_are_no_shares_keep_their_scale():
    given = maps(9, 1, 2)
    longer = inspect.AttentionMaps(given.layers, given.heads, (given[0] * 7,))
    page = inspect.Page("a page")
    page.add_attention(list("abcdefghi"), longer)
    view = data_of(page)["views"][0]
    assert view["scale"] == pytest.approx(float(longer[0].max()))
    kept = decoded(view["weights"], "u1").reshape(1, 2, 9, 9) / 255 * view["scale"]
    assert np.abs(kept - longer[0].numpy()).max() <= view["scale"] / 255 * 0.5 + 1e-5


def test_what_does_not_fit_is_said():
    page = inspect.Page("a page")
    with pytest.raises(ValueError, match="tokens has 3 entries; the text has 5 tokens"):
        page.add_attention(["a", "b", "c"], maps(5, 1, 1))
    with pytest.raises(ValueError, match="tokens has 1 entries; the text has 2 tokens"):
        page.add_attribution(["a"], inspect.Attribution(torch.zeros(2), 1.0, 0.0))
    with pytest.raises(ValueError, match=r"values has shape \(2, 2\), for 2 rows and 1 columns"):
        page.add_similarity(["a", "b"], ["c"], torch.zeros(2, 2))
    with pytest.raises(ValueError, match="with n labels, here 2, and n groups, here 1"):
        page.add_map(torch.zeros(2, 2), ["a", "b"], ["x"])
    page.add_similarity(["t"] * 70, ["u"] * 3, torch.zeros(70, 3))
    view = data_of(page)["views"][0]
    assert len(view["rows"]) == 64 and "Only the first 64 tokens" in view["note"]
