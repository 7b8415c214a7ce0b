"""The pages stay ones that can be read at once: short sentences, and few words where a newcomer begins."""

from __future__ import annotations

import re

import pytest
from prose import ROOT, of, pages, sentences, words

# Beside tables and code.
WORDS = {
    "README.md": 450,
    "CONTRIBUTING.md": 1500,
    "docs/design.md": 1500,
    "docs/training.md": 1500,
    "docs/gpu.md": 2000,
}
MEAN, LONGEST = 20, 40  # words a sentence


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_sentences_are_short(page):
    counted = of(page)
    assert counted.mean <= MEAN
    assert not [each for each in sentences(page.read_text(encoding="utf-8")) if words(each) > LONGEST]
    assert counted.words <= WORDS.get(page.relative_to(ROOT).as_posix(), counted.words)


def test_no_words_that_are_read_twice():
    """In C++ and pages, beside texts that examples encode."""
    files = [path for folder in ("csrc", "docs") for path in (ROOT / folder).rglob("*.*")]
    read = [path for path in files if path.suffix in (".py", ".h", ".cpp", ".cu", ".md") and path.name != "tour.nb.md"]
    assert len(read) > 150
    found = {path.name: set(re.findall(r"(?i)\b(?:whoever|nobody)\b", path.read_text("utf-8"))) for path in read}
    assert not {name: words for name, words in found.items() if words}


def test_what_a_sentence_is():
    text = "# Title\n\nOne, e.g. this one. Two!\n\n- three\n- four, of `a.b()`\n\n```python\nx = 1\n```\n| a | b |\n"
    assert sentences(text) == ["One, e.g. this one.", "Two!", "three", "four, of `a.b()`"]
