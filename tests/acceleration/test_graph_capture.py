"""What fastbert.graphs asks of torch.cuda while it captures and replays, in which order; no GPU needed."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from test_graphs import ON_GPU, make_model

from fastbert import cuda_graphs
from fastbert.cuda_graphs import StaticBatch, bucket_of
from fastbert.packed_inputs import ModelInputs
from fastbert.training.graphed.capture import CudaGraphs


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

        def synchronize(self):
            log.append("synchronize")

    class Graph:
        def replay(self):
            log.append("replay")

        def reset(self):
            log.append("reset")

    @contextmanager
    def device(which):
        log.append("device")
        yield

    @contextmanager
    def stream(which):
        before, fake.current = fake.current, which
        log.append(f"on {which.name}")
        yield
        fake.current = before

    @contextmanager
    def graph(which, stream, capture_error_mode):
        fake.current = stream
        log.append(f"capture on {stream.name}, {capture_error_mode}")
        yield
        if fake.is_invalid:  # as torch does: the stream stays where it is
            raise RuntimeError("operation failed due to a previous error during capture")
        fake.current = caller

    def set_stream(stream):
        fake.current = stream
        log.append(f"back on {stream.name}")

    reserved, caller = iter((100, 164)), Stream(name="current")
    fake = types.SimpleNamespace(
        Stream=Stream, Event=Event, CUDAGraph=Graph, device=device, stream=stream, graph=graph, set_stream=set_stream,
        current_stream=lambda device: fake.current, empty_cache=lambda: log.append("empty_cache"),
        memory_reserved=lambda device: next(reserved), current=caller, is_invalid=False, log=log,
    )  # fmt: skip
    return fake


@pytest.fixture
def batch():
    model = make_model()
    inputs = model.prepare(ModelInputs(torch.randint(1, 40, (2, 8))))
    return model, inputs, StaticBatch.empty(bucket_of(16, 2, 8, False, 64), model.device, model.config.distances)


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the real ones")
def test_a_capture_waits_warms_up_and_keeps_streams_in_order(monkeypatch, cuda, batch):
    model, inputs, static = batch
    caches = []

    def encode(packed):
        cuda.log.append("encode")
        caches.append(packed.batch.cache)
        return model.encode(packed).packed

    with monkeypatch.context() as patch:
        patch.setattr(cuda_graphs.torch, "cuda", cuda)
        captured = cuda_graphs.Captured(encode, static, cuda_graphs.Turns(model.device))
        captured.turns.begin()
        static.fill(inputs)
        captured.replay()
        captured.turns.end()
        captured.free()
    assert cuda.log == [
        "device", "device", "current waits for the last replay", "side waits for current", "on side", "encode",
        "encode", "current waits for side", "empty_cache", "capture on side, thread_local", "encode",
        "back on current", "current waits for the last replay", "replay", "replay recorded on current", "synchronize",
        "reset",
    ]  # fmt: skip
    assert captured.nbytes == 64 + static.nbytes() and captured.out.shape == (16, 64)
    assert len({id(cache) for cache in caches}) == 3  # what a warm-up derived from cu_seqlens is not in the graph


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the real ones")
def test_a_capture_that_fails_leaves_the_caller_on_its_stream(monkeypatch, cuda, batch):
    model, _, static = batch
    cuda.is_invalid = True
    with monkeypatch.context() as patch:
        patch.setattr(cuda_graphs.torch, "cuda", cuda)
        with pytest.raises(RuntimeError, match="during capture"):
            cuda_graphs.Captured(model.encode, static, cuda_graphs.Turns(model.device))
        assert cuda.current.name == "current" and not cuda_graphs.capturing.locked()


class Kept:
    """A graph that says whether it was let go of."""

    is_there = True

    def reset(self):
        self.is_there = False


def of_inference() -> tuple[Kept, Callable[[], None]]:
    captured = cuda_graphs.Captured.__new__(cuda_graphs.Captured)
    captured.graph, captured.turns = Kept(), types.SimpleNamespace(done=types.SimpleNamespace(synchronize=lambda: None))
    return captured.graph, captured.free


def of_training() -> tuple[Kept, Callable[[], None]]:
    graphs = CudaGraphs()
    graphs._graphs.append(Kept())
    return graphs._graphs[0], graphs.free


@pytest.mark.parametrize("make", (of_inference, of_training))
def test_nothing_is_freed_while_another_is_captured(monkeypatch, make):
    """One lock for all graphs of the process."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graph, free = make()
    thread = threading.Thread(target=free)
    with cuda_graphs.capturing:
        thread.start()
        thread.join(0.05)
        assert thread.is_alive() and graph.is_there
    thread.join(10)
    assert not thread.is_alive() and not graph.is_there
