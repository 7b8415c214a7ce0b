"""What clients of text-embeddings-inference, OpenAI, Jina, Cohere and Hugging Face send by default, and get."""

from __future__ import annotations

import asyncio

import asgi
import numpy as np
import pytest
import tiny
from test_routes import LONG, TEXTS, app, assert_same, send
from test_windows_over_http import HEADS

import fastbert
from fastbert.serve import json_text, limits
from fastbert.serve.engine import load_engine
from fastbert.serve.routes import token_ids


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("forms")
    found = {kind: tiny.write_model(root / kind, head=head, **fields) for kind, (head, fields) in HEADS.items()}
    found["sparse"] = tiny.write_model(root / "sparse", head="MaskedLM")
    tiny.write_modules(found["sparse"], "SpladePooling")
    tiny.write_json(found["sparse"] / "1_SpladePooling/config.json", {"pooling_strategy": "max"})
    tiny.write_json(found["embedding"] / "config_sentence_transformers.json", {"prompts": {"query": "who sat ? "}})
    return found


@pytest.fixture(scope="module")
def engines(folders):
    return {kind: load_engine(str(folder), "auto", "cpu") for kind, folder in folders.items()}


@pytest.mark.parametrize(
    "path,content",
    (
        (
            "/embed",
            {
                "inputs": "a dog",
                "truncate": None,
                "normalize": None,
                "prompt_name": None,
                "dimensions": None,
                "windows": None,
                "truncation_direction": None,
                "encoding_format": None,
            },
        ),
        (
            "/v1/embeddings",
            {"input": "a dog", "encoding_format": None, "dimensions": None, "user": None, "model": None},
        ),
        ("/chunks", {"inputs": "a dog", "late": None, "windows": {"length": None, "pool": None}, "return_text": None}),
    ),
)
def test_optional_fields_may_be_null(engines, path, content):
    answer = send(engines["embedding"], path, content)
    needed = "input" if path.startswith("/v1") else "inputs"
    assert answer.status == 200
    assert answer.json == send(engines["embedding"], path, {needed: "a dog"}).json
    if not path.startswith("/v1"):  # Hugging Face's clients send parameters, too
        said = {"windows": content.pop("windows"), "normalize": None}
        beside = send(engines["embedding"], path, {**content, "parameters": said})
        assert beside.json == answer.json
    refused = send(engines["embedding"], path, {needed: None})
    assert refused.status in (400, 422) and f"{needed}: it is null" in refused.body.decode()


def test_token_ids_give_the_vectors_of_their_texts(engines):
    """With the special tokens around them or without; and no other model's ids."""
    engine = engines["embedding"]
    tokenizer = engine.model.tokenizer
    for special in (True, False):
        ids = [tokenizer.encode(text, add_special_tokens=special).ids for text in TEXTS]
        assert_same(send(engine, "/embed", {"inputs": ids}).json, engine.model.encode(TEXTS, normalize=True))
        one = send(engine, "/v1/embeddings", {"input": ids[0]}).json
        assert_same(one["data"][0]["embedding"], engine.model.encode(TEXTS[0], normalize=True))
    prompted = send(engine, "/embed", {"inputs": [ids[1]], "prompt_name": "query"}).json
    assert_same(prompted, engine.model.encode([TEXTS[1]], prompt_name="query", normalize=True))
    long = tokenizer.encode("the cat " * 20 + "sat", add_special_tokens=False).ids * 4
    for side, kept in (("Left", long[-62:]), ("right", long[:62])):
        cut = send(engine, "/embed", {"inputs": long, "truncate": True, "truncation_direction": side}).json
        assert_same(cut, send(engine, "/embed", {"inputs": kept}).json)
    words = len(tiny.VOCAB)
    for content, said in (
        ({"input": [[5], [5, words]]}, f"input[1][1] is {words}; the ids of this model's own tokenizer are 0 to"),
        ({"input": [-1]}, "input[0][0] is -1"),
        ({"input": [5, True]}, "input: id 1 is a truth value; token ids are whole numbers"),
        ({"input": [[5], "a"]}, "input: entry 1 is a text, and entry 0 is a list of token ids"),
        ({"input": long}, "input[0] has more than 64 tokens, the model's limit"),
    ):
        refused = send(engine, "/v1/embeddings", content).json["error"]["message"]
        assert said in refused and "truncate" not in refused and "windows" not in refused, refused
    both = send(engine, "/embed", {"inputs": [5], "windows": True})
    assert both.status == 422 and "windows: chunks are of texts" in both.json["error"]


@pytest.mark.parametrize(
    "ids,said",
    (
        ([1.0, 2.0], "id 0 is 1.0; token ids are whole numbers, without a point or an exponent"),
        ([1, 2.0], "id 1 is 2.0; token ids are"),
        ([[1.0]], "entry 0 id 0 is 1.0; token ids are"),
        ([[5], [5, 1e300]], "entry 1 id 1 is 1e+300; token ids are"),
        ([[True]], "entry 0 id 0 is a truth value; token ids are"),
        ([[5, False]], "entry 0 id 1 is a truth value; token ids are"),
        ([[None]], "entry 0 id 0 is null; token ids are"),
        ([True], "entry 0 is a truth value, not a text"),
    ),
)
def test_only_whole_numbers_are_token_ids(engines, ids, said):
    """On each route that takes some."""
    for kind, path, field in (
        ("embedding", "/v1/embeddings", "input"),
        ("embedding", "/embed", "inputs"),
        ("embedding", "/embed_all", "inputs"),
        ("embedding", "/decode", "ids"),
        ("sparse", "/embed_sparse", "inputs"),
    ):
        refused = send(engines[kind], path, {field: ids})
        told = refused.json["error"]
        assert refused.status == (400 if path.startswith("/v1") else 422), path
        assert f"{field}: {said}" in (told["message"] if path.startswith("/v1") else told), path


def test_openais_route_takes_2048_inputs(engines):
    found = send(engines["embedding"], "/v1/embeddings", {"input": ["a"] * 2048}).json
    assert len(found["data"]) == 2048 and found["usage"]["total_tokens"] == 3 * 2048
    refused = send(engines["embedding"], "/v1/embeddings", {"input": ["a"] * 2049})
    assert refused.status == 400 and "input has 2049 texts; a request may have 2048" in refused.json["error"]["message"]
    name = engines["embedding"].name
    assert send(engines["embedding"], f"/v1/models/{name}", method="GET").json["id"] == name
    assert send(engines["embedding"], "/v1/models/other", method="GET").status == 404


def test_texts_are_cut_at_the_side_that_is_asked_for(engines):
    engine = engines["embedding"]
    words = tiny.WORDS.split()[:20] * 5
    kept = {"left": words[-62:], "Left": words[-62:], "right": words[:62], "Right": words[:62]}
    for side, own in kept.items():
        asked = {"inputs": " ".join(words), "truncate": True, "truncation_direction": side}
        assert_same(send(engine, "/embed", asked).json, engine.model.encode([" ".join(own)], normalize=True))


def test_similarity_and_hugging_faces_client_at_the_root(engines):
    vectors = engines["embedding"].model.encode(TEXTS, normalize=True)
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    for path in ("/similarity", "/"):
        answer = send(engines["embedding"], path, {"inputs": inputs, "parameters": {}})
        np.testing.assert_allclose(answer.json, vectors[1:] @ vectors[0], rtol=1e-5, atol=1e-6)
    for content, said in (
        ({"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences is empty"),
        ({"inputs": {"source_sentence": "a"}}, "no object with source_sentence and sentences"),
        ({"inputs": {"source_sentence": "a", "sentences": ["b", LONG]}}, "inputs.sentences[1] has more than 64 tokens"),
        ({"inputs": {"source_sentence": LONG, "sentences": ["b"]}}, "inputs.source_sentence has more than 64 tokens"),
        ({"inputs": inputs, "parameters": {}, "truncate": True}, "truncate stands beside parameters"),
        ({"inputs": inputs, "parameters": {"top": 3}}, "unknown field 'top'"),
        ({"inputs": inputs, "parameters": 3}, "parameters: it is a number; it must be an object"),
    ):
        refused = send(engines["embedding"], "/similarity", content)
        assert refused.status in (400, 422) and said in refused.json["error"]


def test_pipelines_forms(engines):
    """Where `parameters` are sent, even empty ones, the answer is as Hugging Face's clients read it."""
    ours = send(engines["classifier"], "/", {"inputs": "a dog"}).json
    assert send(engines["classifier"], "/", {"inputs": "a dog", "parameters": {}}).json == [ours]
    raw = send(engines["classifier"], "/predict", {"inputs": "a dog", "parameters": {"raw_scores": True}}).json
    assert raw == [send(engines["classifier"], "/predict", {"inputs": "a dog", "raw_scores": True}).json]
    text = "the cat sat on the mat."
    ours = send(engines["token-classifier"], "/", {"inputs": text}).json[0]
    theirs = send(engines["token-classifier"], "/", {"inputs": text, "parameters": {}}).json
    assert ours and [(one["entity_group"], one["word"], one["start"]) for one in theirs] == [
        (one["label"], one["text"], one["start"]) for one in ours
    ]
    question = {"question": "who sat ?", "context": text}
    ours = send(engines["question-answerer"], "/", {"inputs": question}).json
    assert [send(engines["question-answerer"], "/", {"inputs": question, "parameters": {}}).json] == ours
    refused = send(engines["question-answerer"], "/", {"inputs": {**question, "id": 3}})
    assert "inputs: entry 0: unknown 'id'; known are: question, context" in refused.json["error"]


def test_tokens(engines):
    """/tokenize tells of the tokens that /decode makes texts of; /embed_all gives each one's last hidden state."""
    engine, text = engines["embedding"], "Who sat on the old mat?"
    (tokens,) = send(engine, "/tokenize", {"inputs": text}).json
    assert [one["id"] for one in tokens] == engine.model.tokenizer.encode(text).ids
    assert tokens[0] == {"id": 2, "special": True, "text": "[CLS]", "start": None, "stop": None}
    assert tokens[1] == {"id": tokens[1]["id"], "special": False, "text": "Who", "start": 0, "stop": 3}
    bare = send(engine, "/tokenize", {"inputs": [text], "add_special_tokens": False, "prompt_name": "query"}).json[0]
    assert [one["text"] for one in bare][:4] == ["who", "sat", "?", "Who"] and not any(one["special"] for one in bare)
    assert len(send(engine, "/tokenize", {"inputs": LONG}).json[0]) == 202
    ids = [one["id"] for one in tokens]
    assert send(engine, "/decode", {"ids": ids}).json == ["who sat on the old mat?"]
    whole = send(engine, "/decode", {"ids": [ids, [5]], "skip_special_tokens": False}).json
    assert whole == ["[CLS] who sat on the old mat? [SEP]", "the"]
    assert "ids[0][0] is 9999" in send(engine, "/decode", {"ids": [9999]}).json["error"]
    expected = engine.model.encode(TEXTS, output_value="token_embeddings")
    found = send(engine, "/embed_all", {"inputs": TEXTS}).json
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.float32(one), other.numpy(), rtol=1e-5, atol=1e-6)


def test_tokens_become_json_some_at_a_time(engines, monkeypatch):
    """As objects of Python the tokens of eight long texts left a server 8 MB larger for good."""
    content = {"inputs": ["Who [SEP] sat. " * 20, "the cat", ""]}
    whole, made, dumps = send(engines["embedding"], "/tokenize", content).json, [], json_text.dumps
    assert [len(rows) for rows in whole] == [82, 4, 2]
    monkeypatch.setattr(token_ids, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(json_text, "dumps", lambda rows: made.append(len(rows)) or dumps(rows))
    assert send(engines["embedding"], "/tokenize", content).json == whole
    assert max(made) == 7 and sum(made) == 88


def test_special_tokens_as_the_tokenizer_has_them(folders):
    """No tokenizer.json says whether a special token in a text is one."""
    engine, text = load_engine(str(folders["embedding"]), "auto", "cpu"), "who [SEP] sat " * 40
    for as_text in (False, True):
        engine.model.tokenizer.encode_special_tokens = as_text
        told = send(engine, "/tokenize", {"inputs": "who [SEP]", "add_special_tokens": False}).json
        expected = engine.model.tokenizer.encode("who [SEP]", add_special_tokens=False)
        assert [one["id"] for one in told[0]] == expected.ids and (len(expected) > 2) == as_text
        cut = [
            send(engine, "/embed", {"inputs": text, "truncate": True, **more}).json
            for more in ({}, {"truncation_direction": "left"}, {"truncation_direction": "right"})
        ]
        np.testing.assert_array_equal(cut[0], cut[2])
        assert not np.array_equal(cut[0], cut[1])


def test_sparse_vectors(engines, folders, monkeypatch):
    expected = fastbert.SparseEncoder(folders["sparse"], device="cpu").encode(TEXTS).to_dense().numpy()
    for path in ("/embed_sparse", "/"):
        found = send(engines["sparse"], path, {"inputs": TEXTS}).json
        dense = np.zeros_like(expected)
        for row, one in zip(dense, found, strict=True):
            row[[each["index"] for each in one]] = [each["value"] for each in one]
        np.testing.assert_allclose(dense, expected, rtol=1e-5, atol=1e-6)
        assert all(each["value"] > 0 for one in found for each in one)
    assert send(engines["sparse"], "/embed", {"inputs": "a"}).status == 424
    monkeypatch.setattr(limits, "MAX_WEIGHTS", weights := int(np.count_nonzero(expected)) - 1)
    refused = send(engines["sparse"], "/embed_sparse", {"inputs": TEXTS})
    assert refused.status == 413 and f"{weights + 1:,}" in refused.json["error"]
    assert send(engines["sparse"], "/info", method="GET").json["model_type"] == {"sparse": {"dim": len(tiny.VOCAB)}}


def test_reranking_as_jina_and_cohere_have_it(engines):
    engine, query = engines["reranker"], "who sat?"
    ours = send(engine, "/rerank", {"query": query, "texts": TEXTS}).json
    asked = {"query": query, "documents": [{"text": TEXTS[0]}, *TEXTS[1:]], "model": engine.name}

    async def program(client):
        more = {"top_n": 2, "return_documents": True}
        sent = (client.send("/v1/rerank", asked), client.send("/v2/rerank", {**asked, **more}))
        return await asyncio.gather(*sent, client.send("/v1/rerank", {**asked, "model": "other"}))

    whole, two, other = asgi.run(app(engine), program)
    assert [one["index"] for one in whole.json["results"]] == [one["index"] for one in ours]
    np.testing.assert_allclose(
        [one["relevance_score"] for one in whole.json["results"]], [one["score"] for one in ours], rtol=1e-5
    )
    tokens = sum(engine.model.tokenize([(query, text) for text in TEXTS]).lengths)
    assert whole.json["usage"]["total_tokens"] == tokens and whole.json["model"] == engine.name
    assert [one["document"]["text"] for one in two.json["results"]] == [TEXTS[one["index"]] for one in ours[:2]]
    assert other.status == 404 and "is not served here" in other.json["error"]["message"]
    for content, said in (
        ({"documents": "a"}, "documents: it is a text; it must be a list of texts"),
        ({"documents": [{"text": "a", "id": 1}]}, "documents: entry 0 is an object; it must be a text, or an object"),
        ({"documents": ["a"], "top_n": 0}, "top_n: Input should be greater than or equal to 1; it is 0"),
    ):
        refused = send(engine, "/v1/rerank", {"query": query, **content})
        assert refused.status == 400 and said in refused.json["error"]["message"]
