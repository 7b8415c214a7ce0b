"""Errors say what the route has, and HTTP's own rules are kept: methods, content types, keys."""

from __future__ import annotations

import gzip
import json

import pytest
import tiny
from test_routes import LONG, send

from fastbert.serve.admission import PUBLIC
from fastbert.serve.engine import load_engine

LARGE = "x" * 100_000
CONTENT = {"inputs": "a dog"}
BODY = json.dumps(CONTENT).encode()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return load_engine(str(tiny.write_model(tmp_path_factory.mktemp("refusals") / "model")), "auto", "cpu")


@pytest.mark.parametrize(
    "headers,body,said",
    (
        ({"content-type": "text/plain"}, BODY, "content-type is 'text/plain'; it must be application/json"),
        ({"content-type": "application/x-www-form-urlencoded"}, BODY, "it must be application/json"),
        ({"content-type": "multipart/form-data; boundary=x"}, BODY, "it must be application/json"),
        ({"content-type": "", "origin": "http://a.page"}, BODY, "content-type is ''; it must be application/json"),
        (
            {"content-encoding": "gzip"},
            gzip.compress(BODY, mtime=0),
            "content-encoding is 'gzip'; a body is taken as it is",
        ),
        ({}, gzip.compress(BODY, mtime=0), "the body is not in UTF-8"),
        ({}, json.dumps(CONTENT).encode("utf-16"), "the body is not in UTF-8"),
        ({}, json.dumps(CONTENT).encode("utf-16-le"), "the body is not in UTF-8"),
        ({"content-type": "application/json; charset=latin1"}, BODY, "the body is not in UTF-8"),
    ),
)
def test_what_is_no_json_is_not_read(engine, headers, body, said):
    """Of a web page, too, which may send a form or plain text to any address, and nothing else."""
    answer = send(engine, "/embed", body=body, headers=headers)
    assert answer.status == 415 and said in answer.json["error"] and answer.json["error_type"] == "media"


@pytest.mark.parametrize(
    "headers",
    (
        {"content-type": "Application/JSON; charset=UTF-8"},
        {"content-type": "application/json", "content-encoding": "identity", "origin": "http://a.page"},
        {"content-type": ""},  # a program that says nothing is no web page
    ),
)
def test_what_is_json(engine, headers):
    assert send(engine, "/embed", CONTENT, headers=headers).status == 200


def test_a_byte_that_is_no_utf8_is_named(engine):
    answer = send(engine, "/embed", body=b'{"inputs": "\xff"}')
    assert answer.status == 400 and answer.json["error"] == "the body is not JSON: byte 12 is no UTF-8"


def test_blanks_around_a_coding(engine):
    for coding, status in (("identity ", 200), ("gzip ", 415)):
        assert send(engine, "/embed", CONTENT, headers={"content-encoding": coding}).status == status


def test_methods(engine):
    for path, allowed in (("/embed", "POST"), ("/", "POST"), ("/health", "GET, HEAD"), ("/v1/models", "GET, HEAD")):
        answer = send(engine, path, method="DELETE")
        assert answer.status == 405 and set(answer.headers["allow"].split(", ")) == set(allowed.split(", "))
    for path in ("/health", "/metrics", "/info", "/v1/models", "/docs", "/openapi.json"):
        assert send(engine, path, method="HEAD").status == 200, path
        assert send(engine, path, method="GET").status == 200, path


def test_the_scheme_of_a_key_may_have_any_case_and_blanks_stand_around_it(engine):
    for given, status in (
        ("bearer secret", 200),
        ("Bearer secret ", 200),
        ("Bearer secret \t", 200),
        ("Bearer  secret", 200),
        ("Bearer sec ret", 401),
        ("BEARER secret", 200),
        ("Bearer Secret", 401),
        ("Basic secret", 401),
        ("secret", 401),
        ("bearersecret", 401),
        ("", 401),
    ):
        sent = {"options": {"api_key": "secret"}, "headers": {"authorization": given}}
        assert send(engine, "/embed", CONTENT, **sent).status == status, given


def test_without_the_key_nothing_is_taken_in(engine):
    """Of a POST to what all may read, too: half of one would hold a place among the requests."""
    for path in PUBLIC:
        for method, status in (("GET", 200), ("HEAD", 200), ("OPTIONS", 405), ("POST", 401), ("DELETE", 401)):
            sent = {"options": {"api_key": "secret"}, "method": method, "stalls": method == "POST"}
            assert send(engine, path, **sent).status == status, (method, path)


def test_an_error_advises_what_the_route_has(engine):
    for path, content, has, lacks in (
        ("/embed", {"inputs": LONG}, ("truncate", "windows"), ()),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [LONG]}}, ("truncate",), ("windows",)),
        ("/embed_all", {"inputs": LONG}, ("truncate",), ("windows",)),
        ("/v1/embeddings", {"input": LONG}, (), ("truncate", "windows")),
    ):
        said = send(engine, path, content).body.decode()
        assert "has more than 64 tokens, the model's limit" in said, said
        assert all(word in said for word in has) and not any(word in said for word in lacks), said
    nowhere = send(engine, "/nowhere", CONTENT).json["error"]
    assert "/embed" in nowhere and "/rerank" not in nowhere and "/answers" not in nowhere
    wide = send(engine, "/embed", {"inputs": "a" * 99_999, "dimensions": 33})  # before anything is tokenised
    assert wide.json["error"] == "dimensions is 33; the model's vectors have 32"


@pytest.mark.parametrize(
    "path,content,begins,ends",
    (
        ("/embed", {"inputs": "a", LARGE: 1}, "unknown field 'xxx", "encoding_format, windows"),
        ("/embed", {"inputs": "a", "windows": {LARGE: 1}}, "windows: unknown 'xxx", "pool, limit, at"),
        ("/embed", {"inputs": "a", "windows": {"pool": LARGE}}, "windows: pool of windows is 'x", "top3, first"),
        ("/embed", {"inputs": "a", "windows": {"length": 1e300}}, "windows: length", "takes 64 tokens"),
        ("/embed", {"inputs": "a", "prompt_name": LARGE}, "prompt_name: unknown prompt 'xxx", "has: query, document"),
        ("/embed", {"inputs": "a", "dimensions": 1e300}, "dimensions", "the model's vectors have 32"),
        ("/embed", {"inputs": [10**18]}, "inputs[0][0] is 1000", "(with LangChain: check_embedding_ctx_length=False)"),
        ("/v1/embeddings", {"input": "a", "model": LARGE}, "model 'xxx", "is"),
        (f"/{LARGE}", {}, "POST /xxx", "take POST"),
    ),
)
def test_no_error_repeats_what_is_large(engine, path, content, begins, ends):
    error = send(engine, path, content).json["error"]
    error = error["message"] if path.startswith("/v1") else error
    assert error.startswith(begins) and error.endswith(ends) and len(error) <= 400, error[:1000]
