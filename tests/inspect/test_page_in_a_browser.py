"""The page in a real browser: it is ready soon, shows hostile text as text, and answers to keys, touch and themes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from browser import Tab, tab
from seeds import torch_generator

from fastbert import inspect

HOSTILE = ["<script>document.title = 'broken'</script>", "שלום", "\U0001f600", "a\u202eb", "", "</script>", "end"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with tab(tmp_path_factory.mktemp("browser")) as found:
        yield found


def page_of(tokens: list[str], layers: int = 12, heads: int = 12) -> inspect.Page:
    n = len(tokens)
    probs = (3 * torch.randn(layers, heads, n, n, generator=torch_generator(0))).softmax(-1)
    page = inspect.Page("Inside a model", "of twelve layers")
    page.add_attention(tokens, inspect.AttentionMaps(tuple(range(layers)), tuple(range(heads)), (probs,)))
    scores = torch.linspace(-1, 1, n)
    page.add_attribution(tokens, inspect.Attribution(scores, float(scores.sum()) + 1, 1.0))
    page.add_similarity(tokens[:9], tokens[:9], torch.eye(min(9, n)))
    points = torch.randn(8, 2, generator=torch_generator(1))
    page.add_map(points, [f"text {i} <b>" for i in range(8)], ["river", "money"] * 4)
    return page


def opened(browser: Tab, folder: Path, tokens: list[str], **shape: int) -> None:
    page_of(tokens, **shape).write(folder / "page.html")
    browser.open(folder / "page.html")


def test_hostile_text_is_shown_as_text(browser, tmp_path):
    opened(browser, tmp_path, HOSTILE, layers=2, heads=2)
    assert browser.run("document.title") == "Inside a model"
    shown = browser.run("[...document.querySelectorAll('.tokens button')].map(b => b.textContent)")
    assert shown == [token or "\u2423" for token in HOSTILE]
    assert browser.run("document.querySelectorAll('script').length") == 2


# Of each sentence: the places of the brackets and signs in it that stand before what they belong to.
BEFORE_THEIR_NUMBERS = """[...document.querySelectorAll('p.top, p:not([class])')].map(p => {
  const found = [], walker = document.createTreeWalker(p, NodeFilter.SHOW_TEXT), range = document.createRange();
  const left = (node, at) => { range.setStart(node, at); range.setEnd(node, at + 1);
    return range.getBoundingClientRect().left; };
  for (let node; (node = walker.nextNode());)
    for (const { index } of node.data.matchAll(/[(+\u2212][0-9]/g))
      found.push(left(node, index) < left(node, index + 1));
  return found;
}).filter(found => found.length)"""


def test_text_from_right_to_left_leaves_numbers_as_they_are(browser, tmp_path):
    browser.look(1200, 800, "light")
    opened(browser, tmp_path, HOSTILE, layers=1, heads=1)
    for token in range(len(HOSTILE)):
        browser.run(f"document.querySelectorAll('.tokens button')[{token}].click()")
        (looks_at, adds) = browser.run(BEFORE_THEIR_NUMBERS)
        assert len(looks_at) > 3 and all(looks_at) and adds == [True] * 5, HOSTILE[token]


def test_keys_and_touch(browser, tmp_path):
    opened(browser, tmp_path, [f"word{i}" for i in range(9)], layers=3, heads=2)
    said = "document.querySelector('.top').textContent"
    assert browser.run(said).startswith("Layer 0, head 0. word0 (1) looks at: ")
    browser.run("document.querySelector('.heads button').focus()")
    browser.key("ArrowDown")
    assert browser.run("document.activeElement.getAttribute('aria-label')") == "layer 1, head 0"
    browser.run("document.activeElement.click()")
    assert browser.run(said).startswith("Layer 1, head 0. word0 (1) looks at: ")
    browser.run("document.querySelectorAll('.tokens button')[4].click()")
    browser.run(
        "(select => { select.value = 'to'; select.dispatchEvent(new Event('change')); })"
        "(document.querySelector('select'))"
    )
    assert browser.run(said).startswith("Layer 1, head 0. word4 (5) is looked at by: ")
    browser.run("document.querySelector('input[type=checkbox]').click()")
    assert browser.run(said).startswith("Layer 1, mean of its 2 heads. word4 (5) is looked at by: ")
    assert browser.run("document.querySelectorAll('.heads button[aria-pressed=true]').length") == 1


@pytest.mark.parametrize("width", (1200, 375))
@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_nothing_is_wider_than_the_window(browser, tmp_path, scheme, width):
    browser.look(width, 800, scheme)
    opened(browser, tmp_path, [f"word{i}" for i in range(40)])
    assert browser.run("document.documentElement.scrollWidth") <= width
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 18, 18)"}[scheme]


@pytest.mark.parametrize("scheme,width", [("light", 1200), ("dark", 375)])
def test_everyone_can_use_it(browser, tmp_path, scheme, width):
    """By axe: contrast, names, roles, what a keyboard reaches."""
    found = importlib.util.find_spec("axe_core_python")
    if found is None or found.origin is None:
        pytest.skip("axe-core-python is not installed")
    browser.look(width, 800, scheme)
    opened(browser, tmp_path, [*HOSTILE, "word"], layers=2, heads=2)
    browser.run(Path(found.origin).with_name("axe.min.js").read_text(encoding="utf-8") + "; 0")
    said = browser.run("axe.run().then(r => r.violations.map(v => [v.id, v.impact, v.nodes[0].html]))")
    assert said == [] and browser.run("axe.run().then(r => r.passes.length)") > 20


def test_of_512_tokens_the_others_are_summed_up(browser, tmp_path):
    browser.look(1200, 800, "light")
    opened(browser, tmp_path, [f"word{i}" for i in range(512)], layers=2, heads=2)
    shares = browser.run("document.querySelector('.top').textContent")
    assert "all others together" in shares, shares
    assert browser.run("document.querySelectorAll('.tokens button').length") == 512
