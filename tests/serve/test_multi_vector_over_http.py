"""`fastbert serve` with a multi-vector model: /rerank answers MaxSim, as MultiVectorEncoder computes it."""

from __future__ import annotations

import asyncio

import asgi
import pytest
import tiny

import fastbert
from fastbert.serve.app import Limits, make_app
from fastbert.serve.engine import load_engine

TEXTS = ["the cat sat on the mat.", "a dog", "", "and who ran in to the old house?", "Zo\u00eb"]
QUERY, LONG = "who sat?", "the old cat and the new dog " * 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_stanford(tmp_path_factory.mktemp("served") / "colbert", {"query_maxlen": 16, "doc_maxlen": 24})


@pytest.fixture(scope="module")
def engine(folder):
    return load_engine(str(folder), "auto", "cpu")


@pytest.fixture(scope="module")
def encoder(folder):
    return fastbert.MultiVectorEncoder(folder, device="cpu")


def send(engine, program):
    return asgi.run(make_app(engine, Limits(), None, batch_tokens=64, workers=2, threads=1), program)


def test_rerank(engine, encoder):
    assert engine.model_type == "multi-vector"

    async def program(client):
        asked = {"query": QUERY, "texts": TEXTS}
        plain = [client.send("/rerank", asked) for _ in range(8)]  # queries and documents of several in a batch
        named = client.send("/rerank", {**asked, "return_text": True})
        theirs = {"query": QUERY, "documents": TEXTS, "top_n": 2, "return_documents": True}
        return await asyncio.gather(*plain, named, client.send("/v1/rerank", theirs), client.send("/v2/rerank", theirs))

    *plain, named, first, second = send(engine, program)
    expected = encoder.rank(QUERY, TEXTS)
    for answer in plain:
        assert [row["index"] for row in answer.json] == [row["corpus_id"] for row in expected]
        assert [row["score"] for row in answer.json] == pytest.approx([row["score"] for row in expected], rel=1e-6)
    assert [row["text"] for row in named.json] == [TEXTS[row["corpus_id"]] for row in expected]
    tokens = encoder.tokenize([QUERY], encoder.prompts["query"], "query").lengths.sum()
    tokens += encoder.tokenize(TEXTS, encoder.prompts["document"], "document").lengths.sum()
    for answer in (first, second):
        assert answer.json["usage"]["total_tokens"] == tokens
        for row, one in zip(answer.json["results"], expected[:2], strict=True):
            assert (row["index"], row["document"]["text"]) == (one["corpus_id"], TEXTS[one["corpus_id"]])
            assert row["relevance_score"] == pytest.approx(one["score"], rel=1e-6)


def test_texts_are_cut_where_a_request_says(engine, folder):
    ours = fastbert.MultiVectorEncoder(folder, device="cpu")
    for tokenizer in ours._tokenizers.values():
        tokenizer.enable_truncation(tokenizer.truncation["max_length"], direction="left")

    async def program(client):
        asked = {"query": QUERY, "texts": [LONG], "truncate": True}
        return [
            await client.send("/rerank", {**asked, "truncation_direction": "Left"}),
            await client.send("/rerank", {**asked, "truncate": False}),
            await client.send("/rerank", {**asked, "query": LONG, "truncate": False}),
        ]

    left, document, query = send(engine, program)
    assert left.json[0]["score"] == pytest.approx(ours.rank(QUERY, [LONG])[0]["score"], rel=1e-6)
    assert document.status == query.status == 422
    assert "texts[0] has more than 24 tokens" in document.json["error"]
    assert "query has more than 16 tokens" in query.json["error"]


def test_what_it_refuses_and_says(engine):
    async def program(client):
        info = await client.send("/info", method="GET")
        asked = {"query": "a", "texts": ["b"]}
        windows = await client.send("/rerank", {**asked, "windows": True})
        return info, windows, await client.send("/embed", {"inputs": "a"})

    info, windows, embed = send(engine, program)
    assert info.json["model_type"] == {"multi-vector": {"dim": 16}}
    assert "windows and aggregate are for cross-encoders" in windows.json["error"]
    assert "is no embedding model: it is multi-vector" in embed.json["error"]
