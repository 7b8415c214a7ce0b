"""`fastbert inspect`: what it prints, the page and the arrays that it writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from command_line import fails, run_here

from fastbert import SentenceEncoder, TextClassifier, inspect, pack_inputs

TEXTS = ("the cat sat on the mat.", "a dog ran in the house")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.write_sentence_model(tmp_path_factory.mktemp("encoder"))


def test_one_text(folder, tmp_path):
    done = run_here("inspect", folder, TEXTS[0], "--layers", "-1", "--output", tmp_path / "maps.npz")
    assert done.returncode == 0 and "1 layers, 2 heads" in done.stderr, done.stderr
    encoder = SentenceEncoder(folder)
    ids = encoder.tokenizer.encode(TEXTS[0]).ids
    maps = inspect.attention(encoder.model, pack_inputs([ids]), [-1])
    arrays = np.load(tmp_path / "maps.npz")
    assert np.array_equal(arrays["attention_0"], maps[0].numpy()) and arrays["layers"].tolist() == [1]
    assert arrays["tokens_0"].tolist() == encoder.tokenizer.encode(TEXTS[0]).tokens
    measured = inspect.measure_heads(maps[0], [len(ids) - 1])
    assert np.array_equal(arrays["measures_0"], measured.numpy())
    row = next(line for line in done.stdout.splitlines() if line.startswith("  layer 1"))
    assert row.split()[2:] == [f"{x:.2f}" for x in measured.mean(1)[0].tolist()]


def test_two_texts(folder, tmp_path):
    done = run_here("inspect", folder, *TEXTS, "--output", tmp_path / "both.npz")
    assert done.returncode == 0, done.stderr
    encoder, arrays = SentenceEncoder(folder), np.load(tmp_path / "both.npz")
    vectors = torch.from_numpy(encoder.encode(list(TEXTS)))
    assert float(arrays["cosine"]) == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-5)
    assert f"cosine of the two: {float(arrays['cosine']):.3f}" in done.stdout
    assert arrays["token_cosines"].shape == (len(arrays["tokens_0"]), len(arrays["tokens_1"]))
    assert [len(arrays[f"shares_{i}"]) for i in (0, 1)] == [len(arrays[f"tokens_{i}"]) for i in (0, 1)]
    done = run_here("inspect", folder, *TEXTS, "--output", tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert done.returncode == 0 and page.count('"kind":"attention"') == 2 and '"kind":"similarity"' in page
    done = run_here("inspect", folder, TEXTS[0], "--layers", 0, "--heads", 1, "--output", tmp_path / "one.svg")
    assert done.returncode == 0 and "<svg" in (tmp_path / "one.svg").read_text(encoding="utf-8"), done.stderr
    assert "exists already; --force" in fails("inspect", folder, TEXTS[0], "--output", tmp_path / "both.html")


def test_a_text_that_is_too_long_is_cut_and_said(folder):
    done = run_here("inspect", folder, "the cat sat " * 40)
    assert done.returncode == 0 and "warning: cut to 64 tokens: the cat sat" in done.stderr


@pytest.mark.parametrize(
    "given,message",
    [
        (("a", "b", "c"), "3 texts are given; one or two"),
        (("a", " "), "a text is empty"),
        (("a", "--output", "-"), "--output -: pages, arrays and pictures go into a file"),
        (("a", "--output", "a.pdf"), "the name must end in .html or .npz or .png or .svg"),
        (("a", "--layers", "2"), "there is no layer 2: the model has 2, 0 to 1"),
        (("a", "--heads", "-3"), "there is no head -3"),
    ],
)
def test_what_cannot_be_is_one_line(folder, given, message):
    assert message in fails("inspect", folder, *given)


def test_a_classifier_says_which_words_decided(tmp_path):
    """Of one text, and of a pair, whose second text has types of its own."""
    folder = tiny.write_model(tmp_path / "classifier", head="SequenceClassification", num_labels=3)
    classifier = TextClassifier(folder)
    for texts in (TEXTS[:1], TEXTS):
        asked = texts if len(texts) == 1 else [texts]
        path = tmp_path / f"{len(texts)}.npz"
        done = run_here("inspect", folder, *texts, "--label", "LABEL_2", "--output", path)
        assert done.returncode == 0, done.stderr
        arrays, probabilities = np.load(path), classifier.predict(asked)[0]
        assert arrays["probabilities"] == pytest.approx(probabilities, abs=1e-6) and arrays["label"] == 2
        likeliest = int(probabilities.argmax())
        assert f"  says: LABEL_{likeliest} {probabilities[likeliest]:.3f}, " in done.stdout
        batch = classifier.tokenize(asked).pack([0])
        special = [tiny.VOCAB.index(name) for name in ("[CLS]", "[SEP]")]
        (found,) = inspect.integrated_gradients(classifier.model, batch, 2, kept_ids=special, steps=32)
        assert np.array_equal(arrays["shares_0"], found.scores.numpy())
        tokens = arrays["tokens_0"].tolist()
        assert f"{tokens[int(found.scores.argmax())]} {found.scores.max():+.3f}" in done.stdout
        assert len(arrays["attention_0"][0, 0]) == len(tokens)
    done = run_here("inspect", folder, TEXTS[0], "--output", tmp_path / "page.html")
    assert (
        f"What speaks for LABEL_{int(classifier.predict(TEXTS[:1]).argmax())}" in (tmp_path / "page.html").read_text()
    )
    assert "the model has LABEL_0, LABEL_1, LABEL_2" in fails("inspect", folder, TEXTS[0], "--label", "fish")


def test_only_a_classifier_has_labels(folder):
    assert "is no classifier" in fails("inspect", folder, TEXTS[0], "--label", "fish")
