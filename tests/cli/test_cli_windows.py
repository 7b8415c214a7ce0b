"""--windows: what the commands say of long texts is what our classes say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from command_line import fails, run_here
from seeds import numpy_generator

import fastbert
from fastbert import Windows

SPEC = ("--windows", "length=24", "overlap=6")
CUT = Windows(24, 6)
HEADS = {
    "encoder": ("Model", {}),
    "reranker": ("SequenceClassification", {"num_labels": 1}),
    "classifier": ("SequenceClassification", {"num_labels": 3, "id2label": {0: "bad", 1: "so", 2: "good"}}),
    "tokens": ("TokenClassification", {"num_labels": 3, "id2label": {0: "O", 1: "B-PER", 2: "I-PER"}}),
    "qa": ("QuestionAnswering", {"num_labels": 2}),
}


def documents() -> list[str]:
    draw, words = numpy_generator(4), np.array([*tiny.WORDS.split() * 2, "ran. The", "mat.\n\nWho"])
    return ["", "the cat sat on the mat.", *(" ".join(draw.choice(words, n)) for n in (60, 200, 31))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: tiny.write_model(root / name, head=head, **fields) for name, (head, fields) in HEADS.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "question": "who sat ?"}) + "\n" for text in documents()))
    return path


def rows_of(*arguments: object) -> list[dict]:
    done = run_here(*arguments, "--output", "-")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_vectors_of_every_kind_of_file(folders, source, tmp_path):
    texts, encoder = documents(), fastbert.SentenceEncoder(folders["encoder"], device="cpu")
    options = (source, "--column", "text", "--model", folders["encoder"])
    ((wanted, _),) = encoder.encode_stream(texts, windows=CUT)
    rows = rows_of("encode", *options, *SPEC)
    assert np.array_equal(np.float32([row["embedding"] for row in rows]), wanted)
    # `encode` sorts texts first, and a row's place in a product changes float32's last bits.
    np.testing.assert_allclose(wanted, encoder.encode(texts, windows=CUT), atol=1e-6)
    assert run_here("encode", *options, *SPEC, "--output", tmp_path / "a.npy").returncode == 0
    assert np.array_equal(np.load(tmp_path / "a.npy"), wanted)
    for spec, windows in ((("--windows", "pool=max"), Windows(pool="max")), (("--windows",), Windows())):
        ((wanted, _),) = encoder.encode_stream(texts, windows=windows)
        rows = rows_of("encode", *options, *spec)
        assert np.array_equal(np.float32([row["embedding"] for row in rows]), wanted)


def test_a_run_goes_on_with_its_own_windows_alone(folders, source, tmp_path, monkeypatch):
    """Vectors of other windows do not stand in one file."""
    from fastbert.cli.outputs.growing_array import GrowingArray

    options = ("encode", source, "--column", "text", "--model", folders["encoder"], "--output", tmp_path / "a.npy")

    def stop(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GrowingArray, "finish", stop)
        run_here(*options, *SPEC)
    assert "windows" in fails(*options, "--windows", "length=30")
    assert run_here(*options, *SPEC).returncode == 0


@pytest.mark.parametrize("late", ((), ("--late",)), ids=("plain", "late"))
def test_chunks(folders, source, late):
    texts, encoder = documents(), fastbert.SentenceEncoder(folders["encoder"], device="cpu")
    options = ("encode", source, "--column", "text", "--model", folders["encoder"], "--chunks", *late)
    for spec, windows in (((), None), (SPEC, Windows(24, 6, at="sentences"))):
        expected, rows = encoder.encode_chunks(texts, windows, late=bool(late)), rows_of(*options, *spec)
        assert np.array_equal(np.float32([row["embedding"] for row in rows]), expected.vectors)
        for name, values in (("document", expected.documents), ("start", expected.starts), ("end", expected.ends)):
            assert [row[name] for row in rows] == values.tolist()
        assert all(texts[row["document"]][row["start"] : row["end"]] == row["text"] for row in rows)


def test_search_shows_the_best_passage_of_each_text(folders, source):
    texts, encoder = documents(), fastbert.SentenceEncoder(folders["encoder"], device="cpu")
    options = ("search", "who sat ?", source, "--column", "text", "--model", folders["encoder"])
    chunks = encoder.encode_chunks(texts, Windows(16, 0, at="sentences"))
    scores = encoder.similarity(encoder.encode_query("who sat ?"), chunks.vectors)[0].numpy()
    rows = rows_of(*options, "--windows", "length=16")
    assert len(rows) == len(texts) - 1  # the empty one has no passage
    assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)
    for row in rows:
        best = max(np.flatnonzero(chunks.documents == row["index"]), key=lambda i: scores[i])
        assert (row["score"], row["start"], row["end"]) == (scores[best], chunks.starts[best], chunks.ends[best])
        assert row["text"] == texts[row["index"]][row["start"] : row["end"]]
    table = run_here(*options, "--windows", "length=16", "--top", 2).stdout.splitlines()
    assert [line.split()[1] for line in table] == [str(row["index"]) for row in rows[:2]]
    assert all(" ".join(row["text"].split()) in line for line, row in zip(table, rows, strict=False))


def test_scores_and_labels(folders, source):
    texts = documents()
    reranker = fastbert.Reranker(folders["reranker"], device="cpu")
    options = ("rerank", "who sat ?", source, "--column", "text", "--model", folders["reranker"])
    rows = rows_of(*options, *SPEC)
    expected = reranker.rank("who sat ?", texts, windows=CUT)
    assert [(row["index"], row["score"]) for row in rows] == [(e["corpus_id"], e["score"]) for e in expected]
    for row in rows:  # the passage has this score by itself
        alone = reranker.predict(("who sat ?", row["text"]))
        assert row["score"] == pytest.approx(float(alone), rel=1e-5)
        assert row["text"] == texts[row["index"]][row["start"] : row["end"]]
    classifier = fastbert.TextClassifier(folders["classifier"], device="cpu")
    options = ("classify", source, "--column", "text", "--model", folders["classifier"], "--all")
    for given, aggregate in (((), None), (("--aggregate", "vectors"), "vectors")):
        rows = rows_of(*options, *SPEC, *given)
        scores = np.float32([[row[label] for label in classifier.labels] for row in rows])
        assert np.array_equal(scores, classifier.predict(texts, windows=CUT, aggregate=aggregate))


def test_predict(folders, source):
    texts = documents()
    classifier = fastbert.TextClassifier(folders["classifier"], device="cpu")
    columns = ("--columns", "text")
    rows = rows_of("predict", folders["classifier"], source, *columns, *SPEC, "--all")
    scores = np.float32([[row[label] for label in classifier.labels] for row in rows])
    assert np.array_equal(scores, classifier.predict(texts, windows=CUT))
    tagger = fastbert.TokenClassifier(folders["tokens"], device="cpu")
    for given in ({}, {"aggregate": "probabilities"}):
        options = [word for name, value in given.items() for word in (f"--{name}", value)]
        rows = rows_of("predict", folders["tokens"], source, *columns, *SPEC, *options)
        assert [row["entities"] for row in rows] == tagger.predict(texts, windows=CUT, **given)
    answerer = fastbert.QuestionAnswerer(folders["qa"], device="cpu")
    pairs = [("who sat ?", text) for text in texts]
    for spec, given in ((SPEC, {"windows": CUT}), ((), {})):
        rows = rows_of("predict", folders["qa"], source, "--columns", "question", "text", *spec)
        assert [{k: row[k] for k in ("answer", "score", "start", "end")} for row in rows] == answerer.predict(
            pairs, **given
        )


def test_what_cannot_be_is_refused_before_anything_is_written(folders, source, tmp_path):
    out = tmp_path / "out.jsonl"
    encode = ("encode", source, "--column", "text", "--model", folders["encoder"], "--output", out)
    search = ("search", "who", source, "--column", "text", "--model", folders["encoder"])
    for arguments, message in (
        ((*encode, "--windows", "length=99"), "length of windows is 99; this model takes 64 tokens"),
        ((*encode, "--windows", "overlap=62"), "may overlap by 0 to 61, not by 62"),
        ((*encode, "--windows", "overlap=nan"), "overlap of windows is nan; it is a share below 1"),
        ((*encode, "--windows", "length=2"), "have no room for a text"),
        ((*encode, "--windows", "pool=sum"), "pool of windows is 'sum'; there are mean, max, top3, first"),
        ((*encode, "--windows", "pool=top3"), "pool of windows is 'top3', which is for scores"),
        ((*encode, "--windows", "length=many"), "'length=many' is no number"),
        ((*encode, "--late"), "--late is for --chunks"),
        ((*encode[:-1], tmp_path / "a.npy", "--chunks"), "must end in .jsonl or .parquet"),
        ((*encode, "--engine", "ray", "--windows"), "--windows and --chunks are for --engine local"),
        (("search", "who", "--windows", source, "--model", folders["encoder"]), "a FILE goes before --windows"),
        ((*search, "--windows", "pool=max"), "pool of windows is 'max', and chunks have a vector each: leave it out"),
        ((*search, "--vectors", source, "--windows"), "--windows searches in their passages: give one of them"),
        (
            ("classify", source, "--column", "text", "--model", folders["classifier"], "--aggregate", "logits"),
            "aggregate='logits' is for windows, and there are none",
        ),
        (("predict", folders["tokens"], source, "--columns", "text", *SPEC[:1], "length=2"), "no room for a text"),
    ):
        assert message in fails(*arguments), arguments
    assert not out.exists()


def test_texts_without_words_have_no_passage(folders, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n{"text": "  "}\n')
    options = ("search", "who", path, "--column", "text", "--model", folders["encoder"], "--windows")
    assert "holds no texts with words" in fails(*options)
    assert rows_of("encode", path, "--column", "text", "--model", folders["encoder"], "--chunks") == []
