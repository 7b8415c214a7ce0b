"""Windows over HTTP: documents' vectors, chunks, scores, labels, entities and answers are those of our classes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import asgi
import numpy as np
import pytest
import tiny
from seeds import numpy_generator
from test_routes import app, assert_same, send

import fastbert
from fastbert import Windows
from fastbert.sentences.documents import CHUNKS
from fastbert.serve.engine import load_engine

CUT = {"length": 24, "overlap": 6}
HEADS = {  # of each kind of model, and its fields
    "embedding": ("Model", {}),
    "reranker": ("SequenceClassification", {"num_labels": 1}),
    "classifier": ("SequenceClassification", {"num_labels": 3, "id2label": {0: "bad", 1: "so", 2: "good"}}),
    "token-classifier": ("TokenClassification", {"num_labels": 3, "id2label": {0: "O", 1: "B-PER", 2: "I-PER"}}),
    "question-answerer": ("QuestionAnswering", {"num_labels": 2}),
}


def documents() -> list[str]:
    draw, words = numpy_generator(3), np.array(tiny.WORDS.split() * 3)
    return ["", "the cat sat on the mat.", *(" ".join(draw.choice(words, n)) for n in (60, 200, 31))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("windows")
    return {
        model_type: tiny.write_model(root / model_type, head=head, **fields)
        for model_type, (head, fields) in HEADS.items()
    }


@pytest.fixture(scope="module")
def engines(folders):
    return {model_type: load_engine(str(folder), "auto", "cpu") for model_type, folder in folders.items()}


def close(found, expected) -> None:
    """The same windows in batches of other sizes: equal, but for float32's last bits, which these change."""
    np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=1e-5, atol=1e-6)


def test_kinds_follow_from_the_config(engines):
    assert [engine.model_type for engine in engines.values()] == list(HEADS)
    info = send(engines["token-classifier"], "/info", method="GET").json
    assert info["model_type"] == {
        "token-classifier": {
            "id2label": {"0": "O", "1": "B-PER", "2": "I-PER"},
            "label2id": {"O": 0, "B-PER": 1, "I-PER": 2},
        }
    }
    assert "question-answerer" in send(engines["question-answerer"], "/info", method="GET").json["model_type"]


def test_vectors(engines, folders):
    encoder, texts = fastbert.SentenceEncoder(folders["embedding"], device="cpu"), documents()

    async def program(client):
        fields = ({"windows": CUT}, {"windows": CUT | {"pool": "max"}, "normalize": False}, {"windows": True})
        whole = [client.send("/embed", {"inputs": texts, **given}) for given in fields]
        singles = [client.send("/embed", {"inputs": text, "windows": CUT}) for text in texts]
        return await asyncio.gather(*whole, *singles, client.send("/embed", {"inputs": texts[:2]}))

    mean, largest, default, *singles, plain = asgi.run(app(engines["embedding"]), program)
    expected = encoder.encode(texts, windows=Windows(**CUT), normalize=True)
    close(mean.json, expected)
    close([one.json[0] for one in singles], expected)
    close(largest.json, encoder.encode(texts, windows=Windows(**CUT, pool="max"), normalize=False))
    close(default.json, encoder.encode(texts, windows=Windows(), normalize=True))
    assert_same(plain.json, encoder.encode(texts[:2], normalize=True))  # beside windows in the same batch, too


@pytest.mark.parametrize("late", (False, True))
def test_chunks(engines, folders, late):
    encoder, texts = fastbert.SentenceEncoder(folders["embedding"], device="cpu"), documents()
    for given, windows in (({}, CHUNKS), ({"windows": {"length": 12}}, replace(CHUNKS, length=12))):
        expected = encoder.encode_chunks(texts, windows, late=late, normalize=True)
        found = send(
            engines["embedding"], "/chunks", {"inputs": texts, "late": late, "return_text": True, **given}
        ).json
        assert [len(one) for one in found] == np.bincount(expected.documents, minlength=len(texts)).tolist()
        rows = [row for one in found for row in one]
        assert [row["start"] for row in rows] == expected.starts.tolist()
        assert [row["end"] for row in rows] == expected.ends.tolist()
        assert [row["text"] for row in rows] == [
            texts[i][a:b] for i, a, b in zip(expected.documents, expected.starts, expected.ends, strict=True)
        ]
        close([row["embedding"] for row in rows], expected.vectors)
    assert send(engines["embedding"], "/chunks", {"inputs": ["", " "]}).json == [[], []]


def test_scores_and_labels(engines, folders):
    texts, query = documents(), "who sat ?"
    reranker = fastbert.Reranker(folders["reranker"], device="cpu")
    for given in ({}, {"aggregate": "probabilities"}, {"aggregate": "vectors"}):
        found = send(engines["reranker"], "/rerank", {"query": query, "texts": texts, "windows": CUT, **given}).json
        expected = reranker.rank(query, texts, windows=Windows(**CUT), **given)
        assert [row["index"] for row in found] == [row["corpus_id"] for row in expected]
        close([row["score"] for row in found], [row["score"] for row in expected])
        if given.get("aggregate") == "vectors":  # a passage has no score then
            assert {*found[0]} == {"index", "score"}
            continue
        for row in found:  # that of the best passage by itself
            alone = reranker.predict((query, texts[row["index"]][row["start"] : row["end"]]))
            assert row["score"] == pytest.approx(float(alone), rel=1e-5)
    classifier = fastbert.TextClassifier(folders["classifier"], device="cpu")
    for given in ({}, {"aggregate": "logits"}, {"aggregate": "vectors"}):
        content = {"inputs": [[text] for text in texts], "windows": CUT, **given}
        found = send(engines["classifier"], "/predict", content).json
        scores = [[{one["label"]: one["score"] for one in row}[label] for label in classifier.labels] for row in found]
        close(scores, classifier.predict(texts, windows=Windows(**CUT), **given))


def test_entities_and_answers(engines, folders):
    texts = documents()
    found = send(engines["token-classifier"], "/entities", {"inputs": texts, "windows": CUT}).json
    expected = fastbert.TokenClassifier(folders["token-classifier"], device="cpu").predict(
        texts, windows=Windows(**CUT)
    )
    pairs = [("who sat ?", text) for text in texts]
    content = [{"question": question, "context": text} for question, text in pairs]
    given = {"windows": CUT, "no_answer": True}
    answers = send(engines["question-answerer"], "/answers", {"inputs": content, **given}).json
    answerer = fastbert.QuestionAnswerer(folders["question-answerer"], device="cpu")
    wanted = answerer.predict(pairs, windows=Windows(**CUT), no_answer=True)
    assert len(found) == len(texts) and sum(map(len, found)) > 50
    for one, other in ([answers, wanted], *zip(found, expected, strict=True)):
        close([row.pop("score") for row in one], [row.pop("score") for row in other])
        assert one == other
    alone = send(engines["question-answerer"], "/", {"inputs": content[3], **given}).json
    alone[0].pop("score")
    assert alone == wanted[3:4]


def test_windows_of_many_requests_and_whole_texts_side_by_side(engines, folders):
    encoder, texts = fastbert.SentenceEncoder(folders["embedding"], device="cpu"), documents()

    async def program(client):
        windows = [client.send("/embed", {"inputs": texts[3:], "windows": CUT | {"length": 20 + i}}) for i in range(8)]
        return await asyncio.gather(*windows, *(client.send("/embed", {"inputs": texts[1]}) for _ in range(8)))

    found = asgi.run(app(engines["embedding"]), program)
    for i, answer in enumerate(found[:8]):
        windows = Windows(20 + i, CUT["overlap"])
        close(answer.json, encoder.encode(texts[3:], windows=windows, normalize=True))
    for answer in found[8:]:
        close(answer.json, encoder.encode(texts[1:2], normalize=True))


BAD = {
    "windows: it is a number; it must be a truth value, or an object with length, overlap, pool": {"windows": 3},
    "windows: unknown 'size'; known are: length, overlap, pool, limit, at": {"windows": {"size": 3}},
    "windows: length is a text": {"windows": {"length": "3"}},
    "windows: limit is a truth value": {"windows": {"limit": True}},
    "windows: pool of windows is 'sum'; there are mean, max, top3, first": {"windows": {"pool": "sum"}},
    "windows: pool of windows is 'top3', which is for scores": {"windows": {"pool": "top3"}},
    "windows: length of windows is 65; this model takes 64 tokens": {"windows": {"length": 65}},
    "windows: chunks of 9 tokens, 2 special tokens among them, may overlap": {"windows": {"length": 9, "overlap": 7}},
    "windows: overlap of windows is 1.5": {"windows": {"overlap": 1.5}},
    "with truncate it is cut, and with windows it is read to its end": {"windows": False, "truncate": False},
    "unknown field 'aggregate'": {"aggregate": "logits"},
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_is_refused(engines, message):
    answer = send(engines["embedding"], "/embed", {"inputs": "a " * 99, **BAD[message]})
    assert answer.status in (413, 422) and message in answer.json["error"], answer.json


def test_what_cannot_be_of_other_routes(engines):
    for model_type, path, content, message in (
        ("embedding", "/chunks", {"inputs": "a", "windows": False}, "windows: it is false; for chunks it must be"),
        ("reranker", "/rerank", {"query": "a", "texts": ["b"], "aggregate": "logits"}, "is for windows, and there are"),
        ("reranker", "/rerank", {"query": "a", "texts": ["b"], "aggregate": "sum"}, "aggregate: Input should be"),
        ("question-answerer", "/answers", {"inputs": {"question": "a"}}, "entry 0 is no object with question and"),
        ("question-answerer", "/answers", {"inputs": [{"question": "a", "context": 3}]}, "context is a number, not a"),
        ("token-classifier", "/entities", {"inputs": [3]}, "inputs: entry 0 is a number, not a text"),
        ("token-classifier", "/embed", {"inputs": "a"}, "is no embedding model: it is token-classifier"),
        ("token-classifier", "/entities", {"inputs": []}, "inputs is empty"),
    ):
        answer = send(engines[model_type], path, content)
        assert answer.status >= 400 and message in answer.json["error"], answer.json
