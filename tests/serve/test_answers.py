"""Answers to JSON: part by part, so that a large one holds no other up, and not more than a server can make."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import tiny
from test_routes import send

from fastbert.serve import answers, json_text, limits
from fastbert.serve.answers import as_json, json_parts
from fastbert.serve.engine import load_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return load_engine(str(tiny.write_model(tmp_path_factory.mktemp("served"))), "auto", "cpu")


def contents() -> list:
    rows = np.arange(60, dtype=np.float32).reshape(12, 5) / 7
    token = {"id": 3, "text": 'a "b"', "special": False, "start": None}
    return [
        [], {}, None, "é", 3, [[], []], {"a": {}}, rows, list(rows), rows[:0], rows[0], [rows, rows[:2]], [[token] * 9],
        [[token], []], {"object": "list", "data": [{"index": 0, "embedding": rows[0]}] * 3, "usage": {"tokens": 3}},
        [[{"start": 0, "embedding": rows[1]}], []], [0.5, np.float32(1) / 3], ["a", "b"], rows.astype(np.float64),
    ]  # fmt: skip


@pytest.mark.parametrize("has_orjson", (True, False))
def test_parts_are_the_whole(has_orjson, monkeypatch):
    if not has_orjson:
        monkeypatch.setattr(json_text, "orjson", None)
    for at_once in (1, 7, answers.AT_ONCE):
        monkeypatch.setattr(answers, "AT_ONCE", at_once)
        for content in contents():
            whole = json_text.dumps(content)
            assert b"".join(json_parts(content)) == whole
            made = [json_text.MadeJson(whole)] * 2
            assert b"".join(json_parts(made)) == b"[%b,%b]" % (whole, whole)
            assert bytes(asyncio.run(as_json(content)).body) == whole
    assert len(list(json_parts(contents()[7]))) == 2


def test_others_have_their_turns_while_a_large_answer_is_made():
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def program() -> int:
        beside = asyncio.ensure_future(other())
        answer = await as_json([np.zeros((2000, 64), np.float32) + np.float32(1 / 3)])
        beside.cancel()
        return len(answer.body)

    assert turns >= asyncio.run(program()) // answers.PART - 1 > 10


def test_the_numbers_of_an_answer_have_a_cap(engine, monkeypatch):
    """32 for each vector, or as many as are asked for; nothing is computed."""
    monkeypatch.setattr(engine, "compute", None)
    monkeypatch.setattr(limits, "MAX_NUMBERS", 100)
    text, windows = "a " * 40, {"length": 12, "overlap": 0, "at": "tokens"}
    for path, content, vectors, width in (
        ("/embed", {"inputs": ["a"] * 4}, 4, 32),
        ("/embed", {"inputs": ["a"] * 6, "dimensions": 17}, 6, 17),
        ("/v1/embeddings", {"input": ["a"] * 4}, 4, 32),
        ("/embed_all", {"inputs": "a dog"}, 4, 32),
        ("/chunks", {"inputs": text, "windows": windows}, 4, 32),
        ("/chunks", {"inputs": ["a", text], "windows": windows, "late": True, "dimensions": 30}, 5, 30),
    ):
        answer = send(engine, path, content)
        message = answer.json["error"]["message"] if path.startswith("/v1") else answer.json["error"]
        field = "input" if path.startswith("/v1") else "inputs"
        told = f"{field} would have at least {vectors} vectors of {width} numbers; an answer may have 100 numbers"
        assert (answer.status, message) == (413, f"{told} in all"), path
