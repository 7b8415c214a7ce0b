"""What is refused before it reaches a route: the answer has the form of all others, an id, and a line in the log."""

from __future__ import annotations

import contextlib
import json
import re
import time
from functools import partial

import pytest
import test_connections
import tiny
from test_connections import GET, POST, connection, rest, running, talk

import fastbert.serve.http.protocol as protocol
from fastbert.serve.app import Limits, make_app
from fastbert.serve.engine import load_engine
from fastbert.serve.run import make_server


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    engine = load_engine(str(tiny.write_model(tmp_path_factory.mktemp("refused"))), "auto", "cpu")
    return make_app(engine, Limits(), None, batch_tokens=64, workers=1, threads=1)


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    """Of servers that write errors alone."""
    found: list[str] = []
    monkeypatch.setattr(test_connections, "make_server", partial(make_server, log=found.append))
    return found


def check(answer: bytes, lines: list[str], status: int, kind: str, place: str) -> str:
    """An answer in JSON, with an id, of which the next line tells. Returns the id."""
    deadline = time.monotonic() + 60
    while not lines:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    line = lines.pop(0)
    head, _, body = answer.partition(b"\r\n\r\n")
    headers = dict(part.lower().split(": ", 1) for part in head.decode().split("\r\n")[1:])
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert headers["content-type"] == "application/json" and headers["connection"] == "close"
    assert headers["content-length"] == str(len(body)) and ("retry-after" in headers) == (status == 503)
    said = json.loads(body)
    if isinstance(said["error"], dict):
        said = {"error_type": said["error"]["code"], "error": said["error"]["message"]}
    assert said["error_type"] == kind
    own = headers["x-request-id"]
    assert line.split(" ")[1:3] == [own, "127.0.0.1"]
    expected = f"{place} {status} {len(body)} "
    assert expected in line and line.endswith(f" {kind} {json.dumps(said['error'])}")
    return own


def test_what_is_no_http(app, lines):
    mine = b"POST /v1/embeddings HTTP/1.1\r\nx-request-id: mine\r\ntransfer-encoding: chunked\r\n\r\n"
    with running(app, 100) as port:
        for sent, place in (
            ((b"rubbish\r\n\r\n",), "- -"),
            ((mine, b"zz\r\n"), "POST /v1/embeddings"),
        ):
            own = check(talk(port, *sent), lines, 400, "http", place)
            assert own == "mine" if place != "- -" else re.fullmatch("[0-9a-f]{32}", own)
        with connection(port) as opened:  # what comes behind a request is not that one
            opened.sendall(GET.replace(b"host: x", b"x-request-id: mine"))
            assert b"x-request-id: mine" in rest(opened, b"\r\n\r\n")
            opened.sendall(b"rubbish\r\n\r\n")
            assert check(rest(opened), lines, 400, "http", "- -") != "mine"
        with connection(port) as opened, contextlib.suppress(ConnectionError):
            opened.sendall(POST * 100)
            answer = rest(opened)
            check(answer, lines, 400, "http", "- -")
            assert b"more than 16 requests wait for the first one's answer" in answer
    assert not lines


def test_headers_that_are_too_large(app, lines):
    with running(app, 100) as port:
        answer = talk(port, b"GET /health HTTP/1.1\r\nx-request-id: mine\r\nx: " + b"a" * 65_537)
        assert check(answer, lines, 431, "headers", "- -") == "mine"
    assert b"a request has at most 65536 bytes of headers" in answer and not lines


def test_connections_above_the_limit(app, lines, monkeypatch):
    """Those that ask, the oldest of those that do not, and those that have not asked in time."""
    monkeypatch.setattr(protocol, "SPARE", 1)
    monkeypatch.setattr(protocol, "GRACE_S", 0.3)
    with running(app, 1) as port, connection(port) as inside:
        inside.sendall(GET)
        rest(inside, b"\r\n\r\n")
        answer = talk(port, GET.replace(b"host: x", b"host: x\r\nx-request-id: mine"))
        assert check(answer, lines, 503, "busy", "GET /health") == "mine"
        check(talk(port, POST.replace(b"/embed", b"/v1/embeddings")), lines, 503, "busy", "POST /v1/embeddings")
        with connection(port) as oldest, connection(port) as slow:
            check(rest(oldest), lines, 503, "busy", "- -")
            check(rest(slow), lines, 503, "busy", "- -")
    assert not lines
