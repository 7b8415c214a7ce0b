"""The log's lines: a reader that does not read them holds up nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
from test_server import page, post, served

import fastbert.serve.logs.lines as lines_module
from fastbert.serve.logs.access_log import lost
from fastbert.serve.logs.lines import Lines


def read_all(end: int) -> list[str]:
    """What stands in a pipe whose writers have all closed it."""
    found = b""
    while part := os.read(end, 1 << 16):
        found += part
    os.close(end)
    return found.decode().splitlines()


@pytest.mark.parametrize("blocks", (True, False))
def test_lines_that_are_not_read_are_dropped_and_counted(monkeypatch, blocks):
    """The pipe is full, and then what may wait. Who reads at last finds whole lines, and how many are not there."""
    monkeypatch.setattr(lines_module, "WAITING", 10_000)
    reading, writing = os.pipe()
    os.set_blocking(writing, blocks)
    sent = [f"{i:06} {'x' * (i % 100)}" for i in range(5000)]
    with ThreadPoolExecutor(1) as pool:
        with Lines(writing, lambda count: f"lost {count}") as log:
            for line in sent:
                log.write(line)
                assert log.bytes <= 10_020, log.bytes  # a line that tells of lost ones may stand beyond
            reader = pool.submit(read_all, reading)
            while log.waiting or log.dropped:
                time.sleep(1e-4)
            log.write("after")
        os.close(writing)
        *got, last = reader.result()
    place = 0
    for line in got:
        if line.startswith("lost "):
            place += int(line[5:])
        else:
            assert line == sent[place]
            place += 1
    assert (place, last) == (5000, "after") and len(got) < 4000


def test_the_end_waits_for_a_reader_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr(lines_module, "END_S", 0.01)
    reading, writing = os.pipe()
    with Lines(writing, str) as log:
        for _ in range(3):
            log.write("x" * 65_536)
    assert log.thread.is_alive()
    os.close(reading)
    log.thread.join(60)
    assert not log.thread.is_alive()
    os.close(writing)


def test_a_reader_that_has_gone_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    with Lines(writing, str) as log:
        log.write("one")
    assert not log.thread.is_alive()
    os.close(writing)


def test_the_line_that_stands_for_lost_ones():
    assert json.loads(lost("json", 3))["lost"] == 3
    assert re.fullmatch(r"\d{4}-\S+ lost 3", lost(None, 3)) and re.fullmatch(r"\d{4}-\S+ lost 3", lost("text", 3))


@pytest.mark.full
def test_a_server_whose_stdout_is_not_read(tmp_path):
    with served(tiny.write_model(tmp_path / "model")) as (process, port):
        for _ in range(1000):
            assert post(port, {"inputs": 3})[0] == 422
        assert page(port, "/health") == ""
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
    assert stderr == "fastbert: stopped: answered 0, refused 1000\n"
    assert [line.split(" ")[5] for line in stdout.splitlines()] == ["422"] * 1000
