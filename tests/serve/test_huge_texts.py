"""Texts of megabytes: what was refused or cut is not kept, and a document holds up no request for a word."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiny
from test_server import page, post, served

pytestmark = [pytest.mark.full, pytest.mark.dear_to_set_up]

AT_A_TIME = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("served"), hidden_size=256, num_hidden_layers=4)


def megabytes(pid: int, name: str) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6


@pytest.mark.parametrize("text,times", (("a " * 950_000, 200), ("a" * 1_900_000, 16)), ids=("words", "a word"))
def test_huge_texts_are_not_kept(model, text, times):
    """The word without an end, which has no place to part it, is one unknown token, and neither refused nor cut. It is
    tokenised whole, a second each.
    """
    with served(model) as (process, port), ThreadPoolExecutor(AT_A_TIME) as clients:
        assert post(port, {"inputs": "a"})[0] == 200
        start = megabytes(process.pid, "VmRSS")
        health: list[float] = []
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.05):
                asked = time.perf_counter()
                assert page(port, "/health") == ""
                health.append(time.perf_counter() - asked)

        watching = clients.submit(watch)
        for truncate, status in ((False, 422 if " " in text else 200), (True, 200)):
            answers = clients.map(
                lambda _, given={"inputs": text, "truncate": truncate}: post(port, given), range(times)
            )
            assert {answer[0] for answer in answers} == {status}
        over.set()
        watching.result()
        grown, peak = megabytes(process.pid, "VmRSS") - start, megabytes(process.pid, "VmHWM") - start
    assert grown < 300 and peak < 430, (start, grown, peak)
    assert np.quantile(health, 0.95) < 0.05, np.quantile(health, (0.5, 0.9, 0.95, 0.99, 1)).round(4)


@pytest.mark.parametrize(
    "path,content",
    (("/tokenize", {"inputs": "a " * 200_000}), ("/embed_all", {"inputs": ["a " * 62] * 500})),
    ids=("tokens", "vectors"),
)
def test_no_request_waits_for_a_large_answer(model, path, content):
    """Of 13 MB, and of 90 MB: 8.2 million numbers. To read that JSON here would hold this process up, too."""

    def ask(port: int) -> tuple[int, int]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(content), {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, len(answer.read())

    with served(model, "--max-client-batch-size", 500) as (_, port), ThreadPoolExecutor(1) as clients:
        assert page(port, "/health") == ""
        answer, health = clients.submit(ask, port), list[float]()
        while not answer.done():
            asked = time.perf_counter()
            assert page(port, "/health") == ""
            health.append(time.perf_counter() - asked)
            time.sleep(0.005)
        status, size = answer.result()
    assert status == 200 and size > 10_000_000
    assert max(health) < 0.2, sorted(health)[-5:]


def test_a_word_does_not_wait_for_a_document(model):
    """A cap that lets it be, and a document that takes seconds: words are answered all the while."""
    with served(model, "--threads", 1) as (_, port), ThreadPoolExecutor(2) as clients:
        began = time.perf_counter()
        document = clients.submit(post, port, {"inputs": ["a " * 40_000] * 3, "windows": True})
        words = []
        while not document.done():
            asked = time.perf_counter()
            assert post(port, {"inputs": "a dog"})[0] == 200
            words.append(time.perf_counter() - asked)
        took = time.perf_counter() - began
        assert document.result()[0] == 200
    assert len(words) > 10 and max(words) < took / 4, (took, words)


def test_the_connection_goes_on_after_a_request_of_too_many_tokens(model):
    with served(model, "--max-request-tokens", 1000) as (_, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        for count, status in ((1500, 413), (100, 200)):
            connection.request("POST", "/embed", json.dumps({"inputs": "a " * count, "windows": True}))
            answer = connection.getresponse()
            assert (answer.status, b"more than the 1,000 tokens" in answer.read()) == (status, status == 413)
        connection.close()
