"""What bounds a request's tokens, what tokenises, and what tells that the server lives; and its times."""

from __future__ import annotations

import asyncio
import re
import threading

import asgi
import pytest
import tiny
from test_routes import app, send

from fastbert.data.long_texts import pairs, pieces
from fastbert.data.long_texts.template import Template
from fastbert.serve import limits
from fastbert.serve.engine import load_engine
from fastbert.serve.tokenizing import LARGE, Tokenizing


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return load_engine(str(tiny.write_model(tmp_path_factory.mktemp("served"))), "auto", "cpu")


def test_a_request_has_a_cap_of_tokens(engine):
    """Those of windows count in each that they are in: 40 words in windows of 12, with 2 around, and 4 in common."""
    document = {"inputs": "a " * 40, "windows": {"length": 12, "overlap": 4}}
    tokens = 40 + 2 * 6 + 4 * 5  # six windows of 10 words: they begin at 0, 6, .. 30
    for path, content, asked in (
        ("/embed", document, tokens),
        ("/embed", {"inputs": ["a dog"] * 20}, 80),
        ("/v1/embeddings", {"input": ["a dog"] * 20}, 80),
        ("/chunks", {"inputs": "a " * 40, "windows": {"length": 12}}, 48),
        ("/tokenize", {"inputs": ["a " * 40, "a " * 30]}, 74),
        ("/decode", {"ids": [[5] * 40, [6] * 30]}, 70),
    ):
        assert send(engine, path, content, {"max_request_tokens": asked}).status == 200, path
        answer = send(engine, path, content, {"max_request_tokens": asked - 1})
        message = answer.json["error"]["message"] if path.startswith("/v1") else answer.json["error"]
        field = {"/v1/embeddings": "input", "/decode": "ids"}.get(path, "inputs")
        told = f"{field} has more than the {asked - 1} tokens that a request may have"
        assert (answer.status, message) == (413, told)


def test_windows_of_too_many_tokens_are_not_built(engine, monkeypatch):
    """2,000 words in windows of 62, of which 61 are in common with the next one: 124,000 tokens. One text is built."""
    built: list[int] = []
    around = Template.around
    monkeypatch.setattr(Template, "around", lambda *given: built.append(len(given[-1])) or around(*given))
    windows = {"length": 64, "overlap": 61, "at": "tokens"}
    for path, more in (("/embed", {}), ("/chunks", {}), ("/chunks", {"late": True})):
        content = {"inputs": ["a dog", "a " * 2000], "windows": windows, **more}
        answer = send(engine, path, content, {"max_request_tokens": 10_000})
        assert answer.status == 413 and "inputs has more than the 10,000 tokens" in answer.json["error"]
        assert sum(built) == 2, path  # of the first text
        built.clear()


def test_texts_of_chunks_that_overlap_have_a_cap(engine, monkeypatch):
    """A word without an end stands in each of 60 windows; a text of 1.9 MB was answered with 115 MB."""
    monkeypatch.setattr(limits, "MAX_CHARACTERS", 3000, raising=False)
    windows = {"length": 64, "overlap": 61, "at": "tokens"}
    content = {"inputs": "a " * 70 + "b" * 101 + " a" * 70, "windows": windows, "return_text": True}
    answer = send(engine, "/chunks", content)
    assert answer.status == 413, len(answer.body)
    told = "an answer may have 3,000 characters of texts in all"
    assert re.fullmatch(rf"inputs has chunks of \d\d,\d\d\d characters; {told}", answer.json["error"])
    assert send(engine, "/chunks", {**content, "return_text": False}).status == 200
    assert send(engine, "/chunks", {**content, "windows": {"length": 64, "overlap": 0}}).status == 200


def test_too_many_token_ids_are_not_copied(engine, monkeypatch):
    def refuse(*given):
        raise AssertionError

    monkeypatch.setattr("fastbert.serve.app.sequences_of_ids", refuse)
    monkeypatch.setattr("fastbert.serve.app.check_ids", refuse)
    answer = send(engine, "/embed", {"inputs": [[5] * 40] * 2}, {"max_request_tokens": 79})
    assert answer.status == 413 and "inputs has more than the 79 tokens" in answer.json["error"]


def test_behind_a_text_that_is_refused_none_is_tokenised(engine, monkeypatch):
    monkeypatch.setattr(pieces, "CHARS_AT_ONCE", 100)
    tokenize, read = engine.model.tokenize, list[int]()
    monkeypatch.setattr(
        engine.model, "tokenize", lambda inputs, *more: read.append(len(inputs)) or tokenize(inputs, *more)
    )
    content = {"inputs": ["a", "a dog", "a " * 99, *["the cat " * 20] * 9]}
    assert send(engine, "/embed", content).json["error"].startswith("inputs[2] has more than 64 tokens")
    assert read == [3]
    answer = send(engine, "/embed", content | {"truncate": True})
    assert answer.status == 200 and sum(read[1:]) == 12
    alone = send(engine, "/embed", {"inputs": content["inputs"][3]})
    assert answer.json[3] == answer.json[11] == pytest.approx(alone.json[0], abs=1e-5)


def test_a_long_text_is_refused_by_its_beginning(engine, monkeypatch):
    """And one that is cut is tokenised no further."""
    monkeypatch.setattr(pieces, "PIECE_CHARS", 500)
    read: list[int] = []
    part = pairs.first_piece
    monkeypatch.setattr(pairs, "first_piece", lambda *given: (read.append(len(one := part(*given))), one)[1])
    text = "the cat " * 5000
    refused = send(engine, "/embed", {"inputs": text})
    assert refused.status == 422 and refused.json["error"].startswith("inputs[0] has more than 64 tokens")
    assert 500 <= sum(read) < 1000
    cut = send(engine, "/embed", {"inputs": text, "truncate": True}).json
    assert cut == send(engine, "/embed", {"inputs": "the cat " * 100, "truncate": True}).json


def test_large_texts_are_tokenised_one_after_the_other():
    begun, started, gate, threads = [], threading.Event(), threading.Event(), []

    def make(name: str, wait: bool):
        begun.append(name)
        threads.append(threading.current_thread().name)
        started.set()
        assert not wait or gate.wait(60)
        return name

    async def program():
        tokenizing, large = Tokenizing(), ["a" * LARGE, ("b", "c")]
        first = asyncio.ensure_future(tokenizing.run(lambda: make("first", True), large, 60))
        assert await asyncio.to_thread(started.wait, 60)
        second = asyncio.ensure_future(tokenizing.run(lambda: make("second", False), large, 60))
        small = await tokenizing.run(lambda: make("small", False), ["a" * 3000], 60)
        with pytest.raises(TimeoutError):
            await tokenizing.run(lambda: make("late", False), large, 0.01)
        before = list(begun)
        gate.set()
        return small[0], (await first)[0], (await second)[0], before

    assert asyncio.run(program()) == ("small", "first", "second", ["first", "small"])
    assert begun == ["first", "small", "second"]  # the late one was taken out
    assert threads[0] == threads[2] != threads[1]


def test_who_waits_too_long_for_a_tokenizer_is_told(engine, monkeypatch):
    async def run(self, make, inputs, timeout_s):
        raise TimeoutError

    monkeypatch.setattr(Tokenizing, "run", run)
    for path, content in (("/embed", {"inputs": "a"}), ("/tokenize", {"inputs": "a"}), ("/decode", {"ids": [5]})):
        answer = send(engine, path, content, {"timeout_s": 3})
        assert (answer.status, answer.json["error"]) == (503, "not answered within 3 s: try again later"), path


def test_an_answer_and_the_metrics_say_what_took_the_time(engine):
    async def program(client):
        answers = [await client.send("/embed", {"inputs": ["a dog"] * n}) for n in (1, 20)]
        return *answers, (await client.send("/metrics", method="GET")).body.decode()

    *answers, page = asgi.run(app(engine), program)
    sums = [0.0, 0.0, 0.0]
    for answer in answers:
        found = re.fullmatch(
            r"wait;dur=(\d+\.\d), tokenize;dur=(\d+\.\d), compute;dur=(\d+\.\d)", answer.headers["server-timing"]
        )
        sums = [a + float(b) / 1e3 for a, b in zip(sums, found.groups(), strict=True)]
    for name, seconds in zip(("queue", "tokenization", "inference"), sums, strict=True):
        assert f"te_request_{name}_duration_count 2.0" in page
        told = float(re.search(rf"^te_request_{name}_duration_sum (\S+)$", page, re.MULTILINE)[1])
        assert told > 0 and abs(told - seconds) <= 1.1e-4  # two roundings to a tenth of a millisecond


def test_a_post_that_is_refused_has_its_times_too(engine, monkeypatch):
    """Also where no route was asked, and where the server fails."""
    post, key = {"inputs": "a dog"}, {"api_key": "secret"}
    for path, options, status in (
        ("/embed", key, 401),
        ("/nowhere", {}, 404),
        ("/embed", {"payload_limit": 3}, 413),
        ("/embed", {"max_concurrent_requests": 0}, 429),
        ("/rerank", {}, 424),
    ):
        answer = send(engine, path, post, options)
        assert answer.status == status
        assert answer.headers["server-timing"] == "wait;dur=0.0, tokenize;dur=0.0, compute;dur=0.0"


def test_the_time_of_tokens_alone_is_told(engine):
    async def program(client):
        answers = [await client.send("/tokenize", {"inputs": "a " * 9000}), await client.send("/decode", {"ids": [5]})]
        return answers[0].headers["server-timing"], (await client.send("/metrics", method="GET")).body.decode()

    timing, page = asgi.run(app(engine), program)
    assert float(re.search(r"tokenize;dur=(\d+\.\d)", timing)[1]) > 0
    assert "te_request_tokenization_duration_count 2.0" in page


def test_the_live_route_needs_no_key(engine):
    assert send(engine, "/live", {}, {"api_key": "secret"}, method="GET").status == 200
