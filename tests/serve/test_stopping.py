"""SIGTERM with requests at every point of their way: what was sent whole before is answered or refused, never reset."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
from full import left_to_full
from test_server import served, texts

BODY = json.dumps({"inputs": texts(32, 60)}).encode()
POST = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
BAD = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
CLIENTS = 64

pytestmark = pytest.mark.dear_to_set_up


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("served"), hidden_size=256, num_hidden_layers=4)


def wait_until_closed(port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        while True:
            socket.create_connection(("127.0.0.1", port), 300).close()


def answers(opened: socket.socket) -> list[int]:
    """The statuses of all answers up to the end of the connection, each of them whole; a reset raises."""
    got, found = b"", []
    while part := opened.recv(1 << 16):
        got += part
    while got:
        head, _, rest = got.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])
        assert len(rest) >= length, "the end is missing"
        found.append(int(head.split()[1]))
        got = rest[length:]
    return found


@left_to_full(lambda p: p["without"] != ())
@pytest.mark.parametrize("without", ((), ("uvloop",)))
def test_what_was_sent_whole_is_answered(model, without: Sequence[str]):
    """Half of the clients are inside, the others at the door, and four send three requests before the first answer.

    The process is held while they send, so that for certain nothing of it was read when the signal comes.
    """
    with served(model, without=without) as (process, port), contextlib.ExitStack() as stack:

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), 300))

        inside = [connect() for _ in range(CLIENTS // 2)]
        for one in inside:
            one.sendall(GET)
            assert b" 200 OK" in one.recv(1 << 16)  # so it is inside
        os.kill(process.pid, signal.SIGSTOP)
        opened = [*inside, *(connect() for _ in range(CLIENTS - len(inside)))]
        sent = [[BAD] if i % 8 == 0 else [POST] * 3 if i % 8 == 1 else [POST] for i in range(CLIENTS)]
        for one, requests in zip(opened, sent, strict=True):
            for request in requests:
                one.sendall(request)
        process.send_signal(signal.SIGTERM)
        os.kill(process.pid, signal.SIGCONT)
        found = [answers(one) for one in opened]
        stderr = process.communicate(timeout=300)[1]
    for statuses, requests in zip(found, sent, strict=True):
        assert len(statuses) == len(requests) and all(
            status == 422 if request is BAD else status in (200, 503)
            for status, request in zip(statuses, requests, strict=True)
        ), found
    told = [status for statuses in found for status in statuses]
    assert process.returncode == 0
    assert stderr == f"fastbert: stopped: answered {told.count(200)}, refused {len(told) - told.count(200)}\n"


def test_a_second_ctrl_c_refuses_what_waits(model):
    """At once: what is not computed gets 503, and nothing of the server's insides is printed."""
    with served(model) as (process, port), contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 300)) for _ in range(CLIENTS)]
        for one in opened:
            one.sendall(POST)
        process.send_signal(signal.SIGINT)
        wait_until_closed(port)
        process.send_signal(signal.SIGINT)
        found = [answers(one) for one in opened]
        stderr = process.communicate(timeout=300)[1]
    assert process.returncode == 0
    assert set(map(tuple, found)) <= {(200,), (503,)}
    assert stderr == f"fastbert: stopped: answered {found.count([200])}, refused {found.count([503])}\n"


def test_signals_up_to_the_end_leave_it_a_clean_one(model):
    """Ctrl-C again and again, and SIGTERM: also between the last answer and the end of the process."""
    with served(model) as (process, _):
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            time.sleep(1e-4)
        stderr = process.stderr.read()
    assert (process.returncode, stderr) == (0, "fastbert: stopped: answered 0, refused 0\n")
