"""Many clients at once, among them some that break off and some that ask for too much: 0 wrong, 0 lost, memory flat."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiny
from nginx import in_front_of
from precise import assert_close_to_theirs
from seeds import shifted
from test_huge_texts import megabytes
from test_server import page, served, texts

from fastbert import SentenceEncoder

pytestmark = [pytest.mark.full, pytest.mark.dear_to_set_up]

CLIENTS, BROKEN_OFF, ROUNDS = 64, 200, 3
AT_A_TIME = 48  # requests that the server takes: fewer than there are clients
INPUTS = [texts(1 + i % 5, 1 + i % 30) for i in range(CLIENTS)]
TOO_MUCH = (
    (json.dumps({"inputs": ["a"] * 33}).encode(), 422),
    (json.dumps({"inputs": "a " * 1_010_000}).encode(), 413),
    (json.dumps({"inputs": "a " * 500}).encode(), 422),
    (b'{"inputs": ', 400),
)
POST = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 120000\r\n\r\n" + b" " * 120_000


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    # Large enough that a batch takes milliseconds, so that requests meet.
    return tiny.write_model(tmp_path_factory.mktemp("served"), hidden_size=256, num_hidden_layers=4)


class Client:
    """One that asks again when the server has no room."""

    def __init__(self, port: int):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def ask(self, body: bytes) -> tuple[int, bytes]:
        while True:
            self.connection.request("POST", "/embed", body, {"content-type": "application/json"})
            answer = self.connection.getresponse()
            content = answer.read()
            if answer.status != 429:
                return answer.status, content
            time.sleep(0.01)


def of_client(port: int, number: int) -> list[tuple[int, bytes]]:
    """What one gets: its own texts each time, and once what is too much."""
    client = Client(port)
    with contextlib.closing(client.connection):
        good = [client.ask(json.dumps({"inputs": INPUTS[number]}).encode()) for _ in range(2)]
        return [*good, client.ask(TOO_MUCH[number % len(TOO_MUCH)][0])]


def break_off(port: int, number: int) -> None:
    """In the head, in the body, or behind it; half of them by a reset."""
    with socket.create_connection(("127.0.0.1", port), 60) as opened:
        opened.sendall(POST[: random.Random(shifted(number)).randrange(len(POST) + 1)])
        if number % 2:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


@contextlib.contextmanager
def reached(way: str, port: int, folder: Path) -> Iterator[int]:
    """The port at which clients ask."""
    if way == "direct":
        yield port
        return
    with in_front_of(port, folder) as proxied:
        yield proxied


@pytest.mark.parametrize("way", ("direct", "nginx"))
def test_nothing_is_wrong_or_lost(model, way, tmp_path):
    encoder, exact = (SentenceEncoder.from_pretrained(model, device="cpu", dtype=d) for d in ("float32", "float64"))
    near, oracle = (
        np.concatenate([each.encode(inputs, normalize=True) for inputs in INPUTS]) for each in (encoder, exact)
    )
    limit = ("--max-concurrent-requests", AT_A_TIME)
    with (
        served(model, *limit) as (process, own_port),
        reached(way, own_port, tmp_path) as port,
        ThreadPoolExecutor(CLIENTS + 8) as pool,
    ):
        used = []
        for _ in range(ROUNDS):
            broken = pool.map(break_off, [port] * BROKEN_OFF, range(BROKEN_OFF))
            found = list(pool.map(of_client, [port] * CLIENTS, range(CLIENTS)))
            list(broken)
            used.append(megabytes(process.pid, "VmRSS"))
            for i in range(2):
                assert {answers[i][0] for answers in found} == {200}
                vectors = np.concatenate([np.float32(json.loads(answers[i][1])) for answers in found])
                assert_close_to_theirs(vectors, near, oracle)
            wanted = Counter(status for _, status in TOO_MUCH)
            refused = Counter(answers[2][0] for answers in found)
            assert refused == {status: count * CLIENTS // len(TOO_MUCH) for status, count in wanted.items()}
        assert page(own_port, "/health") == ""
    assert used[-1] - used[0] < 20, used
