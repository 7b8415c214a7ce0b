"""What `benchmarks.documents` is measured with: samples, chapters, passages, documents."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy.stats import norm

from benchmarks.documents import answers, bootstrap, entities, retrieval

WORD = "some words of a paragraph that is quite long "


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution():
    values = np.tile([0.0, 0.0, 0.0, 1.0], 250)
    sums = bootstrap.means(values, np.arange(1000))
    found = bootstrap.compare({"a": sums, "b": sums}, "a")
    half = 100 * norm.ppf(0.975) * np.sqrt(0.25 * 0.75 / 1000)
    assert found["a"]["value"] == 25 and "difference" not in found["a"]
    # A quantile of 10,000 samples is itself known to a fortieth of the half-width; values come in steps of a tenth.
    assert found["a"]["interval"] == pytest.approx([25 - half, 25 + half], abs=0.2)
    assert found["b"]["difference"] == 0 and found["b"]["interval of difference"] == [0, 0]
    assert "| b | 25.0 " in bootstrap.table({"m": found}, "a")[-1]
    assert bootstrap.table({"m": found}, "a")[-1].endswith("| no difference (+0.0 to +0.0) |")


def test_what_always_comes_together_counts_as_one():
    values, groups = np.repeat([0.0, 1.0] * 50, 4), np.repeat(np.arange(100), 4)

    def width(of: np.ndarray) -> float:
        low, high = bootstrap.compare({"a": bootstrap.means(values, of)}, "a")["a"]["interval"]
        return high - low

    ratio = width(groups) / width(np.arange(400))
    assert ratio == pytest.approx(2, rel=0.1)


def test_chapters_lose_their_headings_and_lists_of_contents():
    long = WORD * 40
    book = "A TITLE\nCONTENTS\nCHAPTER I\nThe first\nCHAPTER II\nThe second\n"
    book += (
        f"Chapter 1\n{long}\nmore\nCHAPTER II. THE SECOND\n{long}\nV. The Wine-shop\n{long}\nI. It was not a heading."
    )
    assert retrieval.chapters_of(book) == [[long, "more"], [long], [long, "I. It was not a heading."]]


def test_queries_are_taken_out_of_their_chapters():
    chapters = [[f"{i} {j} " + WORD * 6 for j in range(6)] for i in range(3)] + [[WORD * 6, "short", WORD * 60]]
    found = retrieval.take_out(chapters)
    assert found.of.tolist() == [0, 0, 1, 1, 2, 2] and len(found.chapters) == 4
    for query, i in zip(found.queries, found.of.tolist(), strict=True):
        assert query in chapters[i][1:] and query not in found.chapters[i]
        assert found.chapters[i].startswith(chapters[i][0])


def test_passages_have_the_answer_where_they_say():
    words = [f"w{i}" for i in range(1000)]
    context = " ".join(words)
    asked = [{"question": "which?", "text": text, "start": context.index(text)} for text in ("w0 w1", "w500", "w999")]
    found = list(answers.passages({"context": context, "asked": asked}, random.Random(0)))
    assert len(found) == 6 and all(len(passage.split()) == answers.WORDS for passage, _ in found)
    for (around, entry), (without, silent), one in zip(found[::2], found[1::2], asked, strict=True):
        (answer,) = entry["answers"]
        assert around[answer["answer_start"] :].startswith(one["text"]) and not entry["is_impossible"]
        assert one["text"] not in without and silent["is_impossible"]


def test_documents_keep_all_sentences_and_the_places_of_entities():
    sentence = [("Anna", "B-person"), ("saw", "O"), ("New", "B-location"), ("York", "I-location")]
    documents = entities.documents_of([sentence] * 700)
    assert [len(document.words) for document in documents] == [1000, 1800]
    text = " ".join(documents[0].words)
    said = sorted((start, kind, text[start:end]) for kind, start, end in documents[0].entities)
    assert [(kind, name) for _, kind, name in said] == [("person", "Anna"), ("location", "New York")] * 250
    halved = [set(list(document.entities)[::2]) for document in documents]
    above, below = entities.f1_sums(halved, documents)
    assert above.sum() / below.sum() == pytest.approx(2 / 3)
