"""What graphs ask of torch.cuda while they are captured, replayed and freed, in which order; no GPU needed."""

from __future__ import annotations

import threading
import types
from contextlib import contextmanager

import pytest
import torch
from test_graphs import ON_GPU

from fastbert.cuda_graphs import capture
from fastbert.cuda_graphs.capture import CudaGraphs

pytestmark = pytest.mark.skipif(ON_GPU, reason="a GPU runs the real ones")
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch):
    """A recording stand-in for torch.cuda, which lists in `log` the calls that are made; `current` is its stream."""
    log: list[str] = []

    class Stream:
        def __init__(self, device=None, name="side"):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event):
            log.append(f"{self.name} waits for the last replay")

    class Event:
        def record(self, stream):
            log.append(f"replay recorded on {stream.name}")

    class Graph:
        def replay(self):
            log.append("replay")

        def reset(self):
            log.append("reset")

        def pool(self):
            return "a pool"

    @contextmanager
    def device(which):
        yield

    @contextmanager
    def stream(which):
        before, fake.current = fake.current, which
        log.append(f"on {which.name}")
        yield
        fake.current = before

    @contextmanager
    def graph(which, pool, stream, capture_error_mode):
        fake.current = stream
        log.append(f"capture in {pool or 'its own'} on {stream.name}, {capture_error_mode}")
        yield
        if fake.is_invalid:  # as torch does: the stream stays where it is
            raise RuntimeError("operation failed due to a previous error during capture")
        fake.current = caller

    def set_stream(stream):
        fake.current = stream
        log.append(f"back on {stream.name}")

    reserved, caller = iter((100, 164, 164, 180)), Stream(name="current")
    fake = types.SimpleNamespace(
        Stream=Stream,
        Event=Event,
        CUDAGraph=Graph,
        device=device,
        stream=stream,
        graph=graph,
        set_stream=set_stream,
        current_stream=lambda device: fake.current,
        empty_cache=lambda: log.append("empty_cache"),
        synchronize=lambda device=None: log.append("synchronize"),
        memory_reserved=lambda device: next(reserved),
        current=caller,
        is_invalid=False,
        log=log,
    )
    monkeypatch.setattr(capture.torch, "cuda", fake)
    return fake


CAPTURE = ["synchronize", "empty_cache", "capture in its own on side, thread_local", "run", "back on current", "replay"]


@pytest.mark.parametrize("shares", (True, False))
def test_a_capture_waits_warms_up_and_keeps_streams_in_order(cuda, shares):
    graphs = CudaGraphs(DEVICE, shares_memory=shares)

    def run():
        cuda.log.append("run")

    graphs.warm(run)
    assert cuda.log == ["side waits for current", "on side", "run", "current waits for side"]
    cuda.log.clear()
    first = graphs.capture(run)
    assert cuda.log == CAPTURE and graphs.nbytes() == graphs.nbytes(first) == 64
    cuda.log.clear()
    second = graphs.capture(run)
    where = "a pool" if shares else "its own"
    assert cuda.log == [line.replace("its own", where) for line in CAPTURE] and graphs.nbytes() == 80
    cuda.log.clear()
    for _ in range(2):
        graphs.begin()
        second()
        graphs.end()
    end = ["replay", "replay recorded on current"]
    assert cuda.log == [*end, "current waits for the last replay", *end]
    cuda.log.clear()
    graphs.warm(run)  # behind what others launched
    assert cuda.log[:2] == ["current waits for the last replay", "side waits for current"]
    cuda.log.clear()
    graphs.free(first)
    assert cuda.log == ["synchronize", "reset"] and graphs.nbytes() == 16
    graphs.free()
    graphs.free()
    assert cuda.log == ["synchronize", "reset"] * 2 and graphs.nbytes() == 0


def test_a_capture_that_fails_leaves_the_caller_on_its_stream(cuda):
    cuda.is_invalid = True
    graphs = CudaGraphs(DEVICE)
    with pytest.raises(RuntimeError, match="during capture"):
        graphs.capture(lambda: None)
    assert cuda.current.name == "current" and not capture.capturing.locked() and graphs.nbytes() == 0


def test_nothing_is_freed_while_another_is_captured(cuda):
    """One lock for all graphs of the process, of inference and of training."""
    graphs = CudaGraphs(DEVICE)
    graphs.capture(lambda: None)
    thread = threading.Thread(target=graphs.free)
    with capture.capturing:
        thread.start()
        thread.join(0.05)
        assert thread.is_alive() and "reset" not in cuda.log
    thread.join(10)
    assert not thread.is_alive() and cuda.log[-1] == "reset"
