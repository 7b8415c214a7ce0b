"""Clients that are slow, endless, too many, or talk rubbish: each ends alone, and the server goes on."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator

import asgi
import numpy as np
import pytest
import tiny

import fastbert.serve.http.protocol as protocol
from fastbert.serve.app import Limits, make_app
from fastbert.serve.engine import load_engine
from fastbert.serve.run import Web, bind, make_server

BODY = b'{"inputs": "a dog"}'
POST = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return load_engine(str(tiny.write_model(tmp_path_factory.mktemp("served"))), "auto", "cpu")


@contextlib.contextmanager
def running(app, max_connections: int, web: Web | None = None, **limits) -> Iterator[int]:
    """The port of a server in a thread of this process."""
    bound = bind("127.0.0.1", 0)
    bound.listen()
    server = make_server(app, Limits(**limits), max_connections, web=web or Web())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@contextlib.contextmanager
def live(engine, max_connections: int = 100, **limits) -> Iterator[int]:
    """The port of a server of the model, which at the end must still answer."""
    app = make_app(engine, Limits(**limits), None, batch_tokens=64, workers=1, threads=1)
    with running(app, max_connections, **limits) as port:
        yield port
        assert talk(port, POST).startswith(b"HTTP/1.1 200 OK")


@contextlib.contextmanager
def connection(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), 60) as opened:
        yield opened


def rest(opened: socket.socket, until: bytes | None = None) -> bytes:
    """What comes, up to the end of the connection, or until it has what is given."""
    got = b""
    with contextlib.suppress(ConnectionError):
        while (until is None or until not in got) and (part := opened.recv(65536)):
            got += part
    return got


def talk(port: int, *sent: bytes) -> bytes:
    """What a server answers to bytes, the last of which asks it to close; it may do so before all is sent."""
    with connection(port) as opened, contextlib.suppress(ConnectionError):
        for part in sent:
            opened.sendall(part.replace(b"host: x", b"host: x\r\nconnection: close"))
        return rest(opened)
    return b""


def statuses(answer: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d+)", answer)]


def test_what_is_no_request_is_refused(engine):
    with live(engine, payload_limit=2000) as port:
        for sent, status in (
            (b"rubbish\r\n\r\n", 400),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400),  # TLS
            (b"POST /embed HTTP/9.9\r\n\r\n", 400),
            (b"POST /embed HTTP/1.1\r\ncontent-length: ten\r\n\r\n", 400),
            (b"POST /embed HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
            (b"POST /embed HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n", 400),
            (b"POST /embed HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
            (b"POST /embed HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
            (b"POST /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n", 400),
            (b"GET http://[ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
            (b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 3000\r\n\r\n", 413),
            (b"POST /embed HTTP/1.1\r\nhost: x\r\n\r\n", 400),  # no body
            (b"BREW /embed HTTP/1.1\r\nhost: x\r\n\r\n", 400),
            (b"DELETE /embed HTTP/1.1\r\nhost: x\r\n\r\n", 405),
            (b"POST /../etc/passwd HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}", 404),
        ):
            assert statuses(talk(port, sent)) == [status], sent


def test_forms_of_requests(engine):
    """Chunks, HTTP/1.0, several requests in one packet, one byte at a time, and a client that asks before it sends."""
    chunked = b"POST /embed HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    chunked += b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    asks = POST.replace(b"host: x", b"host: x\r\nexpect: 100-continue")
    with live(engine) as port:
        assert statuses(talk(port, chunked)) == [200]
        assert statuses(talk(port, POST.replace(b"HTTP/1.1", b"HTTP/1.0"))) == [200]
        with connection(port) as opened:
            for byte in POST:
                opened.sendall(bytes([byte]))
            assert statuses(rest(opened, b"]]")) == [200]
        with connection(port) as opened:
            opened.sendall(POST + GET + POST + GET.replace(b"host: x", b"host: x\r\nconnection: close"))
            assert statuses(rest(opened)) == [200] * 4
        assert statuses(talk(port, asks)) in ([100, 200], [200])


def test_heads_without_end_are_cut_off(engine):
    endless = (
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: ", b"a" * 8192),  # one header
        (b"GET /health HTTP/1.1\r\nhost: x\r\n", b"a: b\r\n" * 1000),  # many
        (b"GET /", b"a" * 8192),  # a path
        (b"POST /embed HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"1;" + b"a" * 5000 + b"\r\na\r\n"),
    )
    with live(engine) as port:
        for first, more in endless:
            with connection(port) as opened, pytest.raises(ConnectionError):
                opened.sendall(first)
                for _ in range(100_000):
                    opened.sendall(more)


def test_who_sends_too_slowly_or_nothing_is_left(engine, monkeypatch):
    monkeypatch.setattr(protocol, "GRACE_S", 0.3)
    with (
        live(engine, timeout_s=0.3) as port,
        connection(port) as silent,
        connection(port) as head,
        connection(port) as body,
    ):
        head.sendall(b"POST /embed HTTP/1.1\r\nhost:")
        body.sendall(POST[:-5])
        assert rest(silent) == rest(head) == b""
        assert statuses(rest(body)) == [408]


def test_who_never_reads_is_left():
    """The answer is larger than all buffers; what waits to send its rest goes on when the connection has ended."""
    over = threading.Event()

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            return await asgi.lifespan(receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(50_000_000), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        over.set()

    with running(app, 100, timeout_s=0.2) as port, connection(port) as opened:
        opened.sendall(GET)
        assert over.wait(60)


def test_too_many_requests_that_wait_for_each_other(engine, capfd):
    with live(engine) as port, connection(port) as opened, contextlib.suppress(ConnectionError):
        opened.sendall(POST * 5000)
        assert statuses(rest(opened)) == [400]
    assert capfd.readouterr().err == ""


def test_connections_above_the_limit_are_turned_away(engine):
    with live(engine, max_connections=3) as port:
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                opened = stack.enter_context(connection(port))
                opened.sendall(GET)
                assert statuses(rest(opened, b"\r\n\r\n")) == [200]
            assert statuses(talk(port, GET)) == [503]
        deadline = time.monotonic() + 60
        while statuses(talk(port, GET)) != [200]:  # until it has seen that they have gone
            assert time.monotonic() < deadline


def test_half_of_a_request_does_not_hide_that_the_server_lives(engine, monkeypatch):
    """As many as can connect, and more than may ask above the limit: each new one, the oldest of these goes."""
    monkeypatch.setattr(protocol, "SPARE", 4)
    live_route = GET.replace(b"/health", b"/live")
    with live(engine, max_connections=3) as port, contextlib.ExitStack() as stack:
        halves = []
        for _ in range(20):
            halves.append(stack.enter_context(connection(port)))
            halves[-1].sendall(POST[:40])
            answer = talk(port, live_route)
            assert statuses(answer) == [200] and (len(halves) < 3 or b"connection: close" in answer)
        assert statuses(talk(port, GET)) == statuses(talk(port, POST)) == [503]
        assert statuses(rest(halves[3])) == [503]  # the oldest above the limit
        halves[0].sendall(POST[40:])
        assert statuses(rest(halves[0], b"]]")) == [200]
        stack.close()
        deadline = time.monotonic() + 60
        while statuses(talk(port, GET)) != [200]:
            assert time.monotonic() < deadline


def test_a_client_that_leaves_at_any_point_harms_no_other(engine):
    with live(engine) as port:
        for i in range(0, len(POST), 7):
            with connection(port) as opened:
                opened.sendall(POST[:i])
        for _ in range(20):
            with connection(port) as opened:
                opened.sendall(POST)
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset at once


def test_hugging_faces_client(engine, monkeypatch):
    """It sends to the address that it is given."""
    from huggingface_hub import InferenceClient, constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # this machine is no hub
    with live(engine) as port:
        for path in ("", "/embed"):
            client = InferenceClient(f"http://127.0.0.1:{port}{path}", timeout=60)
            vectors = client.feature_extraction("a dog", normalize=True)
            assert np.array_equal(np.float32(vectors), engine.model.encode(["a dog"], normalize=True))


def test_the_page_of_metrics_is_prometheuss(engine):
    from prometheus_client.parser import text_string_to_metric_families

    with live(engine) as port:
        talk(port, POST)
        page = talk(port, GET.replace(b"/health", b"/metrics")).partition(b"\r\n\r\n")[2].decode()
    samples = {}
    for family in text_string_to_metric_families(page):
        assert family.type in ("counter", "gauge", "histogram") and family.documentation, family
        samples.update({(one.name, *one.labels.values()): one.value for one in family.samples})
    assert samples["te_request_success_total", "single"] == 1
    assert samples["te_request_input_length_sum",] == 4  # [CLS] a dog [SEP]
    assert samples["process_cpu_seconds_total",] > 0
