"""The end after a signal, with requests in flight; after a second Ctrl-C; and after many signals."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiny
from full import left_to_full
from test_server import page, post, served, texts

BODY = json.dumps({"inputs": texts(32, 60)}).encode()
POST = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
IN_FLIGHT = 50

pytestmark = pytest.mark.dear_to_set_up


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("served"), hidden_size=256, num_hidden_layers=4)


def wait_for_requests(port: int) -> None:
    """Until the server has read as many as are sent."""
    deadline = time.monotonic() + 120
    while f'te_request_count_total{{method="batch"}} {IN_FLIGHT}.0' not in page(port, "/metrics"):
        assert time.monotonic() < deadline


@left_to_full(lambda p: p["number"] == signal.SIGINT)  # SIGINT's way is SIGTERM's
@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_lets_what_is_in_flight_finish(model, number):
    """All are answered, new ones are not, the exit code is 0."""
    inputs = texts(32, 60)
    with served(model) as (process, port), ThreadPoolExecutor(IN_FLIGHT) as clients:
        waiting = [clients.submit(post, port, {"inputs": inputs}) for _ in range(IN_FLIGHT)]
        wait_for_requests(port)
        process.send_signal(number)
        answers = [future.result() for future in waiting]
        stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 0
    assert stderr == f"fastbert: stopped: answered {IN_FLIGHT}, refused 0\n"
    assert [status for status, _ in answers] == [200] * IN_FLIGHT
    assert all(np.shape(vectors) == (32, 256) for _, vectors in answers)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 5)


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


def test_a_second_ctrl_c_refuses_what_waits(model):
    """At once: what is not computed gets 503, and nothing of the server's insides is printed."""
    with served(model) as (process, port), contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 300)) for _ in range(IN_FLIGHT)]
        for one in opened:
            one.sendall(POST)
        wait_for_requests(port)
        process.send_signal(signal.SIGINT)
        with pytest.raises(ConnectionError):  # once it has seen the signal
            while True:
                socket.create_connection(("127.0.0.1", port), 300).close()
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
