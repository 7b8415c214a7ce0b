"""The routes of `fastbert serve`: what they answer, beside SentenceEncoder and Reranker, and what they refuse."""

from __future__ import annotations

import asyncio
import base64
import threading

import asgi
import numpy as np
import pytest
import tiny
import torch

from fastbert import Reranker, SentenceEncoder, TextClassifier
from fastbert.ops import are_weights_packed
from fastbert.serve.app import Limits, make_app
from fastbert.serve.engine import Engine, load_engine

TEXTS = ["the cat sat on the mat.", "a dog", "", "and who ran in to the old house?", "Zoë"]
LONG = "the cat " * 100


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("served")
    folders = {"embedding": tiny.write_model(root / "embedding")}
    tiny.write_json(folders["embedding"] / "config_sentence_transformers.json", {"prompts": {"query": "who sat? "}})
    for model_type, labels in (("reranker", 1), ("classifier", 3)):
        folders[model_type] = tiny.write_model(root / model_type, head="SequenceClassification", num_labels=labels)
    tiny.edit_config(folders["classifier"], id2label={"0": "bad", "1": "so-so", "2": "good"})
    return folders


@pytest.fixture(scope="module")
def engines(folders) -> dict:
    return {model_type: load_engine(str(folder), "auto", "cpu") for model_type, folder in folders.items()}


def app(engine, api_key=None, workers=2, **limits):
    return make_app(engine, Limits(**limits), api_key, batch_tokens=64, workers=workers, threads=1)


def send(engine, path, content=None, options=None, **sent) -> asgi.Answer:
    return asgi.run(app(engine, **(options or {})), lambda client: client.send(path, content, **sent))


def test_kinds_follow_from_the_config(engines):
    assert {name: engine.model_type for name, engine in engines.items()} == {name: name for name in engines}


def assert_same(answer, expected) -> None:
    """Numbers of an answer, which JSON has whole, are those of our classes, to the bit where products are ours: a
    request is another batch."""
    if are_weights_packed():
        assert np.array_equal(np.float32(answer), np.float32(expected))
    else:
        np.testing.assert_allclose(np.float32(answer), np.float32(expected), rtol=1e-5)


def test_embed_gives_encodes_vectors(engines, folders):
    encoder = SentenceEncoder.from_pretrained(folders["embedding"], device="cpu")

    async def program(client):
        whole = client.send("/embed", {"inputs": TEXTS})
        singles = [client.send("/embed", {"inputs": text, "normalize": False}) for text in TEXTS]
        prompted = client.send("/embed", {"inputs": TEXTS[:2], "prompt_name": "query"})
        cut = client.send("/embed", {"inputs": [LONG], "truncate": True, "dimensions": 5})
        return await asyncio.gather(whole, *singles, prompted, cut)

    whole, *singles, prompted, cut = asgi.run(app(engines["embedding"]), program)
    assert whole.status == 200 and whole.headers["content-type"] == "application/json"
    assert_same(whole.json, encoder.encode(TEXTS, normalize=True))
    assert_same([answer.json[0] for answer in singles], encoder.encode(TEXTS, normalize=False))
    assert_same(prompted.json, encoder.encode(TEXTS[:2], prompt_name="query", normalize=True))
    assert_same(cut.json, encoder.encode([LONG], truncate_dim=5, normalize=True))


def test_openais_route(engines, folders):
    engine = engines["embedding"]
    expected = SentenceEncoder.from_pretrained(folders["embedding"], device="cpu").encode(TEXTS[:2], normalize=True)
    lengths = engine.model.tokenize(TEXTS[:2]).lengths.tolist()
    answer = send(engine, "/v1/embeddings", {"input": TEXTS[:2], "model": engine.name, "user": "me"}).json
    assert answer["object"] == "list" and answer["model"] == engine.name
    assert answer["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    assert [(row["object"], row["index"]) for row in answer["data"]] == [("embedding", 0), ("embedding", 1)]
    assert_same([row["embedding"] for row in answer["data"]], expected)
    coded = send(engine, "/v1/embeddings", {"input": TEXTS[:2], "encoding_format": "base64"}).json["data"]
    rows = np.stack([np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in coded])
    assert_same(rows, expected)
    models = send(engine, "/v1/models", method="GET").json
    assert [model["id"] for model in models["data"]] == [engine.name]


def test_rerank_gives_the_rerankers_scores(engines, folders):
    ours = Reranker.from_pretrained(folders["reranker"], device="cpu")
    query = "who sat?"
    expected = ours.rank(query, TEXTS)
    asked = {"query": query, "texts": TEXTS}
    answer = send(engines["reranker"], "/rerank", asked).json
    assert [row["index"] for row in answer] == [row["corpus_id"] for row in expected]
    assert_same([row["score"] for row in answer], [row["score"] for row in expected])
    raw = send(engines["reranker"], "/rerank", {**asked, "raw_scores": True, "return_text": True}).json
    logits = ours.predict([(query, row["text"]) for row in raw], activation_fn=torch.nn.Identity())
    assert_same([row["score"] for row in raw], logits)
    assert all(TEXTS[row["index"]] == row["text"] for row in raw)


def test_predict_gives_labels(engines, folders):
    ours = Reranker.from_pretrained(folders["classifier"], device="cpu")
    pairs = [["a dog", "ran"], ["the mat"]]
    answer = send(engines["classifier"], "/predict", {"inputs": pairs}).json
    logits = ours.rows_of(ours.tokenize([tuple(pairs[0]), pairs[1][0]]))
    for row, expected in zip(answer, logits.softmax(-1), strict=True):
        scores = {entry["label"]: entry["score"] for entry in row}
        assert [entry["score"] for entry in row] == sorted(scores.values(), reverse=True)
        assert_same([scores[name] for name in ("bad", "so-so", "good")], expected)
    single = send(engines["classifier"], "/predict", {"inputs": pairs[0]}).json  # a pair by itself, as in the list
    assert [entry["label"] for entry in single] == [entry["label"] for entry in answer[0]]
    raw = send(engines["classifier"], "/predict", {"inputs": "the mat", "raw_scores": True}).json
    assert_same(raw[0]["score"], logits[1].max())
    one = send(engines["reranker"], "/predict", {"inputs": [["a dog", "ran"]]}).json
    assert [entry["label"] for entry in one[0]] == ["LABEL_0"] and 0 < one[0][0]["score"] < 1


@pytest.mark.parametrize("problem_type", ("regression", "multi_label_classification", None))
def test_predict_gives_what_the_classifier_gives(problem_type, tmp_path):
    """A regression's number as it is: it came through a sigmoid here, and raw from a TextClassifier."""
    folder = tiny.write_model(tmp_path / "scorer", head="SequenceClassification", num_labels=1)
    tiny.edit_config(folder, problem_type=problem_type)
    expected = TextClassifier.from_pretrained(folder, device="cpu").predict(["the mat", "a dog"])
    answer = send(load_engine(str(folder), "auto", "cpu"), "/predict", {"inputs": [["the mat"], ["a dog"]]}).json
    assert_same([[entry["score"] for entry in row] for row in answer], expected)


def test_health_metrics_info(engines):
    async def program(client):
        await client.send("/embed", {"inputs": TEXTS})
        await client.send("/embed", {"inputs": 3})
        return [await client.send(path, method="GET") for path in ("/health", "/metrics", "/info", "/openapi.json")]

    health, metrics, info, schema = asgi.run(app(engines["embedding"]), program)
    assert health.status == 200
    page = metrics.body.decode()
    for line in (
        'te_request_count_total{method="batch"} 1.0',
        'te_request_success_total{method="batch"} 1.0',
        'te_request_failure_total{err="validation"} 1.0',
        "te_request_duration_count 1.0",
        "te_queue_size 0.0",
        f"te_batch_next_size_sum {len(TEXTS):.1f}",
    ):
        assert f"\n{line}\n" in page, line
    assert info.json["max_input_length"] == 64 and info.json["model_type"] == {"embedding": {"dim": 32}}
    body = schema.json["paths"]["/embed"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert all("inputs" in form["required"] for form in body["anyOf"])  # fields beside parameters, or in them


EMBED, OPENAI, RERANK, PREDICT = "/embed", "/v1/embeddings", "/rerank", "/predict"


@pytest.mark.parametrize(
    "kind,path,content,status,said",
    (
        ("embedding", EMBED, {"inputs": 3}, 422, "inputs: it is a number; it must be a text or a list of texts"),
        ("embedding", EMBED, {"inputs": ["a", None]}, 422, "inputs: entry 1 is null, not a text"),
        ("embedding", EMBED, {"inputs": [[5, 999]]}, 422, "inputs[0][1] is 999; the ids of this model's own"),
        ("embedding", EMBED, {"inputs": []}, 400, "inputs is empty"),
        ("embedding", EMBED, {"inputs": ["a"] * 33}, 422, "inputs has 33 texts; a request may have 32"),
        ("embedding", EMBED, {"inputs": ["a", LONG]}, 422, "inputs[1] has more than 64 tokens, the model's limit"),
        ("embedding", EMBED, {"inputs": "a", "truncate": "yes"}, 422, "truncate: Input should be a valid boolean"),
        ("embedding", EMBED, {"inputs": "a", "pooling": "cls"}, 422, "unknown field 'pooling'; known are: truncate,"),
        ("embedding", EMBED, {"inputs": "a", "prompt_name": "x"}, 422, "prompt_name: unknown prompt 'x'"),
        ("embedding", EMBED, {"inputs": "a", "dimensions": 33}, 422, "dimensions is 33; the model's vectors have 32"),
        ("embedding", EMBED, {"inputs": "a", "dimensions": 0}, 422, "dimensions: Input should be greater than or"),
        ("embedding", EMBED, {"inputs": "a", "truncation_direction": "up"}, 422, "'Right' or 'right'; it is 'up'"),
        ("embedding", EMBED, {}, 422, "inputs: Field required"),
        ("embedding", EMBED, ["a"], 422, "the body is a list; it must be an object"),
        ("embedding", OPENAI, {"input": LONG}, 400, "input[0] has more than 64 tokens, the model's limit"),
        ("embedding", OPENAI, {"input": "a", "model": "other"}, 404, "model 'other' is not served here"),
        ("embedding", RERANK, {"query": "a", "texts": ["a"]}, 424, "reranker or multi-vector model: it is embedding"),
        ("classifier", EMBED, {"inputs": "a"}, 424, "is no embedding model: it is classifier"),
        ("classifier", PREDICT, {"inputs": ["a", "b", "c"]}, 422, "several texts are [[text], [text], ...]"),
        ("classifier", PREDICT, {"inputs": [["a"], "b"]}, 422, "entry 1 is no list of 1 or 2 texts"),
        ("reranker", RERANK, {"query": "a", "texts": []}, 400, "texts is empty"),
        ("reranker", RERANK, {"query": "a", "texts": ["b", 1]}, 422, "texts.1: Input should be a valid string"),
    ),
)  # fmt: skip
def test_what_is_refused(engines, kind, path, content, status, said):
    answer = send(engines[kind], path, content)
    message = answer.json["error"]["message"] if path == OPENAI else answer.json["error"]
    assert answer.status == status and said in message, answer


@pytest.mark.parametrize(
    "body,status,said",
    (
        (b"{rubbish", 400, "the body is not JSON"),
        (b"", 400, "the body is not JSON"),
        (b'{"inputs": "\xff\xfe"}', 400, "the body is not JSON"),
        (b'{"inputs": "\\ud800"}', 400, "the body is not JSON"),
        (b'{"inputs": "a", "dimensions": NaN}', 400, "the body is not JSON"),
        (b'{"inputs": "a", "dimensions": 1e999}', 400, "the body is not JSON"),
        (b"[" * 100_000, 400, "the body is not JSON"),
        (b'{"inputs": [""' + b',""' * 999_999 + b"]}", 422, "inputs has 1000000 texts; a request may have 32"),
        (b'{"inputs": "' + b"a" * 3000 + b'"}', 413, "the body has more than 2,000 bytes"),
    ),
)
def test_bodies_that_are_rubbish(engines, body, status, said):
    limit = len(body) if len(body) >= 100_000 else 2000
    answer = send(engines["embedding"], EMBED, options={"payload_limit": limit}, body=body)
    assert answer.status == status and said in answer.json["error"]


def test_routes_that_are_not_there(engines):
    for path, method, status in (("/nothing", "POST", 404), ("/embed", "GET", 405)):
        answer = send(engines["embedding"], path, {}, method=method)
        assert answer.status == status and "of this model /embed, /v1/embeddings, /similar" in answer.json["error"]


def test_the_api_key(engines):
    def status(path, method="POST", **headers):
        sent = {"options": {"api_key": "secret"}, "headers": headers, "method": method}
        return send(engines["embedding"], path, {"inputs": "a"}, **sent).status

    assert status("/embed") == status("/embed", authorization="Bearer other") == status("/info", "GET") == 401
    assert status("/embed", authorization="Bearer secret") == 200
    assert status("/health", "GET") == status("/metrics", "GET") == 200


class Held(Engine):
    """An engine whose batches wait until they are let go, or fail."""

    def __init__(self, engine: Engine, fails: bool = False):
        super().__init__(engine.name, engine.model_type, engine.model, engine.labels)
        self.begun, self.gate, self.fails = threading.Event(), threading.Event(), fails

    def compute(self, sequences):
        self.begun.set()
        assert self.gate.wait(60)
        if self.fails:
            self.fails = False
            raise MemoryError("no room")
        return super().compute(sequences)


def test_too_many_requests_are_refused_at_once(engines):
    held = Held(engines["embedding"])

    async def program(client):
        first = [asyncio.ensure_future(client.send("/embed", {"inputs": "a"})) for _ in range(3)]
        assert await asyncio.to_thread(held.begun.wait, 60)
        refused = await client.send("/embed", {"inputs": "a"})
        held.gate.set()
        return refused, [await answer for answer in first], await client.send("/embed", {"inputs": "a"})

    refused, answered, later = asgi.run(app(held, max_concurrent_requests=3), program)
    assert refused.status == 429 and refused.headers["retry-after"] == "1"
    assert [answer.status for answer in (*answered, later)] == [200] * 4


def test_timeouts(engines):
    held = Held(engines["embedding"])

    async def program(client):
        slow = await client.send("/embed", {"inputs": "a"})
        held.gate.set()
        stalled = await client.send("/embed", body=b'{"inp', headers={"content-length": "100"}, stalls=True)
        return slow, stalled, await client.send("/embed", {"inputs": "a"})

    slow, stalled, later = asgi.run(app(held, timeout_s=0.2), program)
    assert (slow.status, slow.json["error_type"]) == (503, "timeout")
    assert (stalled.status, stalled.json["error_type"]) == (408, "slow")
    assert later.status == 200


def test_a_client_that_goes_away_is_not_computed_and_the_server_goes_on(engines):
    held = Held(engines["embedding"])

    async def program(client):
        first = asyncio.ensure_future(client.send("/embed", {"inputs": "a"}))
        assert await asyncio.to_thread(held.begun.wait, 60)
        gone = asyncio.Event()
        leaving = asyncio.ensure_future(client.send("/embed", {"inputs": ["b"] * 9}, gone=gone))
        await asyncio.sleep(0.05)
        gone.set()
        nothing = await leaving
        held.gate.set()
        answers = await first, nothing, await client.send("/embed", {"inputs": "c"})
        return *answers, (await client.send("/metrics", method="GET")).body.decode()

    first, nothing, later, page = asgi.run(app(held, workers=1), program)
    assert (first.status, nothing.status, later.status) == (200, 0, 200)
    assert 'te_request_failure_total{err="disconnected"} 1.0' in page
    assert "te_batch_next_size_sum 2.0" in page


def test_a_failure_of_the_model_is_told_and_the_server_goes_on(engines):
    held = Held(engines["embedding"], fails=True)
    held.gate.set()

    async def program(client):
        failed = await client.send("/embed", {"inputs": "a"})
        return failed, await client.send("/embed", {"inputs": "a"}), await client.send("/health", method="GET")

    failed, later, health = asgi.run(app(held), program)
    assert failed.status == 424 and failed.json["error"] == "the model failed: MemoryError: no room"
    assert (later.status, health.status) == (200, 200)
