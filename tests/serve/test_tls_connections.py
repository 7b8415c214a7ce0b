"""With TLS, too, connections that only take room keep no client out: in a handshake, behind it, and after a refusal."""

from __future__ import annotations

import contextlib
import resource
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor

import asgi
import certificate
import pytest
import tiny
from test_connections import GET, connection, rest, running, statuses

import fastbert.serve.http.protocol as protocol
import fastbert.serve.http.server as server
from fastbert.serve.app import Limits, make_app
from fastbert.serve.engine import load_engine
from fastbert.serve.run import SPARE_FILES, Web, connections

CONTEXT = ssl.create_default_context(cadata=certificate.CERTIFICATE)


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    engine = load_engine(str(tiny.write_model(tmp_path_factory.mktemp("tls"))), "auto", "cpu")
    return make_app(engine, Limits(), None, batch_tokens=64, workers=1, threads=1)


@pytest.fixture
def web(tmp_path, monkeypatch) -> Web:
    monkeypatch.setattr(server, "HANDSHAKE_S", 600.0)
    files = tmp_path / "certificate.pem", tmp_path / "key.pem"
    for file, text in zip(files, (certificate.CERTIFICATE, certificate.KEY), strict=True):
        file.write_text(text)
    return Web(certfile=str(files[0]), keyfile=str(files[1]))


def shaken(opened: socket.socket) -> ssl.SSLSocket:
    return CONTEXT.wrap_socket(opened, server_hostname="127.0.0.1")


def test_of_too_many_handshakes_the_oldest_goes(app, web):
    live = GET.replace(b"/health", b"/live")
    with running(app, 3, web=web) as port, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connection(port)) for _ in range(3 + protocol.SPARE + 1)]
        assert rest(silent[0]) == b""
        for i in (1, 2):  # each newer one, one more
            silent.append(stack.enter_context(connection(port)))
            assert rest(silent[i]) == b""
        for opened in silent[-3:]:
            with shaken(opened) as talking:
                talking.sendall(live)
                assert statuses(rest(talking, b"\r\n\r\n")) == [200]


def test_who_is_refused_and_does_not_go_is_cut_off(app, web, monkeypatch):
    """TLS waits for the client's goodbye, for half a minute."""
    monkeypatch.setattr(protocol, "SPARE", 1)
    with running(app, 1, web=web) as port, contextlib.ExitStack() as stack:
        opened = [shaken(stack.enter_context(connection(port))) for _ in range(3)]
        assert statuses(rest(opened[1])) == [503]
        began = time.monotonic()
        with socket.socket(fileno=opened[1].detach()) as below:
            below.settimeout(60)
            assert below.recv(1) == b"" and time.monotonic() - began < 20
        for one in opened:
            one.close()


def test_clients_that_say_no_goodbye_do_not_hold_the_stop(app, web):
    """One is idle, and one has the last answer that it asked for. TLS would wait half a minute for either."""
    with contextlib.ExitStack() as stack:
        with running(app, 3, web=web) as port:
            for request in (GET, GET.replace(b"host: x", b"host: x\r\nconnection: close")):
                opened = stack.enter_context(shaken(stack.enter_context(connection(port))))
                opened.sendall(request)
                assert statuses(rest(opened, b"\r\n\r\n")) == [200]
            began = time.monotonic()
        assert time.monotonic() - began < 10


def test_the_stop_does_not_cut_off_an_answer(web, monkeypatch):
    """Its client reads after many times the time that is left for a goodbye. It is larger than the sockets' buffers."""
    monkeypatch.setattr(protocol, "LINGER_S", 0.02)
    size = 30_000_000

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            return await asgi.lifespan(receive, send)
        length = (b"content-length", b"%d" % size)
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": bytes(size)})

    def read(opened: ssl.SSLSocket) -> int:
        time.sleep(0.5)
        size = 0
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while part := opened.recv(1 << 16):
                size += len(part)
        return size

    with contextlib.ExitStack() as stack:
        with running(app, 3, web=web) as port:
            opened = stack.enter_context(shaken(stack.enter_context(connection(port))))
            opened.sendall(GET)
            head = rest(opened, b"\r\n\r\n")
            late = stack.enter_context(ThreadPoolExecutor(1)).submit(read, opened)
        left = len(head.partition(b"\r\n\r\n")[2])
        assert late.result() == size - left


def test_of_a_socket_that_has_gone_nothing_is_told():
    opened = socket.socket()
    opened.close()
    assert protocol.bytes_sent(opened) is None


def test_handshakes_have_files_of_their_own(monkeypatch):
    most: list[int] = []
    monkeypatch.setattr(resource, "setrlimit", lambda name, limits: most.append(limits[0]))
    for hard, has_tls, allowed, raised in (
        (10_000, False, 1000, 1000 + SPARE_FILES), (10_000, True, 1000, 2000 + 2 * SPARE_FILES),
        (564, False, 500, 564), (564, True, 218, 564),
    ):  # fmt: skip
        monkeypatch.setattr(resource, "getrlimit", lambda name, hard=hard: (300, hard))
        assert (connections(500, has_tls), most.pop()) == (allowed, raised)
