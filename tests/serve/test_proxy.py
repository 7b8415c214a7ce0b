"""Behind a real nginx with the lines of docs/containers.md: what it hands on, and what does not reach the server."""

from __future__ import annotations

import json
import select
import threading
import time
from functools import partial

import asgi
import pytest
import test_connections
import tiny
from nginx import in_front_of
from test_connections import BODY, POST, connection, rest, running, statuses, talk

from fastbert.serve.app import Limits, make_app
from fastbert.serve.engine import load_engine
from fastbert.serve.run import Web, make_server

TELLS = POST.replace(b"host: x", b"host: x\r\nx-forwarded-for: 192.0.2.1")  # what a client claims to be
HALF = len(POST) - len(BODY) // 2


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    engine = load_engine(str(tiny.write_model(tmp_path_factory.mktemp("proxied"))), "auto", "cpu")
    return make_app(engine, Limits(), None, batch_tokens=64, workers=1, threads=1)


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """The lines of a server, one a request."""
    found: list[str] = []
    monkeypatch.setattr(test_connections, "make_server", partial(make_server, log=found.append))
    return found


def test_answers_and_errors_come_through(app, log, tmp_path):
    with running(app, 100, web=Web(access_log="json")) as port, in_front_of(port, tmp_path) as proxied:
        direct, answer = talk(port, POST), talk(proxied, TELLS)
        assert statuses(answer) == [200] and direct.partition(b"\r\n\r\n")[2] == answer.partition(b"\r\n\r\n")[2]
        refused = talk(proxied, POST.replace(b'"a dog"', b"[1.0]  "))
        large = talk(proxied, POST.replace(b"%d" % len(BODY), b"2050000"), bytes(2_050_000))
        assert statuses(refused) == [422] and statuses(large) == [413]
        assert b'"error_type":"too_large"' in large
    lines = [json.loads(line) for line in log]
    assert [line["status"] for line in lines] == [200, 200, 422, 413]
    assert {line["client"] for line in lines} == {"127.0.0.1"}  # nginx's own word for it
    assert b"x-request-id: %s" % lines[1]["id"].encode() in answer.lower()


def test_what_is_too_large_for_the_proxy_does_not_reach_the_server(app, log, tmp_path):
    with running(app, 100, web=Web(access_log="text")) as port, in_front_of(port, tmp_path) as proxied:
        for sent, status in (
            (POST.replace(b"host: x", b"host: x\r\nx: " + b"a" * 40_000), 400),
            (POST.replace(b"/embed", b"/" + b"a" * 40_000), 414),
            (POST.replace(b"%d" % len(BODY), b"3000000"), 413),
            (b"rubbish\r\n\r\n", 400),
        ):
            with connection(proxied) as opened:
                opened.sendall(sent)
                assert statuses(rest(opened, b"</html>")) == [status]
    assert not log


def test_a_byte_at_a_time(app, log, tmp_path):
    """A head that takes too long is cut off, and the server does not know of it. Of a body it gets the whole."""
    settings = {"client_header_timeout": "1s"}
    with running(app, 100, web=Web(access_log="text")) as port, in_front_of(port, tmp_path, **settings) as proxied:
        with connection(proxied) as opened:
            for byte in POST:
                opened.sendall(bytes([byte]))
                if select.select([opened], [], [], 0.1)[0]:
                    break
            assert rest(opened) == b"" and not log
        with connection(proxied) as opened:
            opened.sendall(POST[:HALF])
            for byte in POST[HALF:]:
                time.sleep(0.1)
                assert not log
                opened.sendall(bytes([byte]))
            assert statuses(rest(opened, b"]]")) == [200]
    (line,) = log
    assert float(line.split(" ")[7]) < 0.1 * (len(POST) - HALF)  # seconds


def test_an_answer_that_is_not_read_is_nginxs(tmp_path):
    """The server is done with it, although it is larger than all buffers of sockets."""
    over = threading.Event()

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            return await asgi.lifespan(receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(50_000_000), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        over.set()

    with running(app, 100) as port, in_front_of(port, tmp_path) as proxied, connection(proxied) as opened:
        opened.sendall(POST)
        assert over.wait(60)
