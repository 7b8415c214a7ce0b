"""Clients that are slow, too many, leave, or talk rubbish: each ends alone, and the server goes on."""

from __future__ import annotations

import contextlib
import re
import resource
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import tiny

from fastbert.serve.app import Limits, make_app
from fastbert.serve.engine import load_engine
from fastbert.serve.run import SPARE_FILES, Web, bind, connections, make_server

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


def test_a_body_that_does_not_arrive_in_time(engine):
    """It is told so, and cut off: what else it sends would be read for nothing."""
    with live(engine, timeout_s=0.3) as port, connection(port) as body:
        body.sendall(POST[:-5])
        assert statuses(rest(body)) == [408]


def test_connections_above_the_limit_are_turned_away(engine):
    with live(engine, max_connections=3) as port:
        with contextlib.ExitStack() as stack:
            for status in (200, 200, 503):
                opened = stack.enter_context(connection(port))
                opened.sendall(GET)
                assert statuses(rest(opened, b"\r\n\r\n")) == [status]
        while statuses(talk(port, GET)) != [200]:  # until it has seen that they have gone
            pass


def test_a_connection_needs_a_file(monkeypatch):
    most: list[int] = []
    monkeypatch.setattr(resource, "setrlimit", lambda name, limits: most.append(limits[0]))
    for hard, allowed, raised in ((10_000, 1000, 1000 + SPARE_FILES), (564, 500, 564)):
        monkeypatch.setattr(resource, "getrlimit", lambda name, hard=hard: (300, hard))
        assert (connections(500), most.pop()) == (allowed, raised)


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
