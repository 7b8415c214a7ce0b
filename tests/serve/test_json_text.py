"""Bodies with orjson and without it: the same values."""

from __future__ import annotations

import json

import numpy as np
import orjson
import pytest
import tiny
from seeds import numpy_generator
from test_server import post, served

from fastbert.serve import json_text

BROKEN = [
    b"",
    b"{",
    b"[NaN]",
    b"[Infinity]",
    b"\xff",
    b"\xff\xfe[\x001\x00",
    b"[" * 100_000,
    b"[1,]",
    b"\xef\xbb\xbf[1]",
]


def test_the_same_values_go_out(monkeypatch):
    vectors = numpy_generator(0).standard_normal((3, 5)).astype(np.float32)
    vectors[0, :3] = np.float32(1e-30), np.nan, -np.inf
    content = {"a": vectors, "b": [np.float32(0.1), np.int64(3), None, True, 'käse ✓ \x00 "'], "c": float("nan")}
    with_orjson = json_text.dumps(content)
    monkeypatch.setattr(json_text, "orjson", None)
    without = json_text.dumps(content)
    assert json.loads(without) == json.loads(with_orjson)
    assert without.decode().startswith('{"a":[[1e-30,null,null,')


@pytest.mark.parametrize("body", BROKEN, ids=lambda body: repr(body[:8]))
def test_the_same_bodies_are_refused(body, monkeypatch):
    with pytest.raises(ValueError):
        json_text.loads(body)
    monkeypatch.setattr(json_text, "orjson", None)
    with pytest.raises(ValueError):
        json_text.loads(body)
    assert json_text.loads(b' {"inputs": ["caf\xc3\xa9", 1, 2.5, null]}') == orjson.loads(
        b'{"inputs": ["caf\xc3\xa9", 1, 2.5, null]}'
    )


@pytest.mark.parametrize("has_orjson", (True, False))
def test_half_of_a_pair_of_surrogates_is_no_text(has_orjson, monkeypatch):
    """It would be refused by all that takes UTF-8: the tokenizer, and our own answers."""
    if not has_orjson:
        monkeypatch.setattr(json_text, "orjson", None)
    for body, said in (
        (rb'{"inputs": "\ud800"}', r"no low surrogate in string: line 1 column 13 \(char 12\)"),
        (rb'["\ud83d\ude00", {"a\uDBFFa": 1}]', r"no low surrogate in string: line 1 column 21 \(char 20\)"),
        (rb'"\uDC00\ud800"', r"invalid high surrogate in string: line 1 column 2 \(char 1\)"),
        (rb'"\ud800\ud800\udc00"', r"invalid low surrogate in string: line 1 column 2 \(char 1\)"),
    ):
        with pytest.raises(ValueError, match=said):
            json_text.loads(body)
    assert json_text.loads(rb'["\ud83d\ude00", "\\ud800", "\\\ud83d\uDE00\n\u00e9"]') == ["😀", r"\ud800", "\\😀\né"]


@pytest.mark.full
def test_a_server_without_what_only_makes_it_faster(tmp_path):
    """A process that cannot import orjson or uvloop gives the answers of one that can."""
    model, answers = tiny.write_model(tmp_path / "model"), []
    for without in ((), ("orjson", "uvloop")):
        with served(model, without=without) as (_, port):
            answers.append([post(port, {"inputs": ["a cat", "käse"]}), post(port, {"inputs": 3}), post(port, [1])])
    assert answers[0] == answers[1]
    assert [status for status, _ in answers[0]] == [200, 422, 422]
