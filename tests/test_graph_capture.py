"""What fastbert.graphs asks of torch.cuda while it captures and replays, in which order; no GPU needed."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager

import pytest
import torch
from test_graphs import ON_GPU, make_model

from fastbert.graphs import StaticBatch, bucket_of

MODULE = sys.modules["fastbert.graphs"]


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the real ones")
def test_a_capture_waits_warms_up_and_keeps_streams_in_order(monkeypatch):
    """Against a recording stand-in for torch.cuda: which calls are made, in which order."""
    log: list[str] = []

    class Stream:
        def __init__(self, device=None):
            self.name = "side" if device is not None else "current"

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
    def inside(what, **options):
        log.append(f"enter {getattr(what, 'name', type(what).__name__)}{sorted(options)}")
        yield
        log.append("leave")

    reserved = iter((100, 164))
    cuda = types.SimpleNamespace(
        Stream=Stream, Event=Event, CUDAGraph=Graph, device=inside, stream=inside, graph=inside,
        current_stream=lambda device: Stream(), empty_cache=lambda: log.append("empty_cache"),
        memory_reserved=lambda device: next(reserved),
    )  # fmt: skip
    model = make_model()
    inputs = model.prepare(torch.randint(1, 40, (2, 8)), *[None] * 6)
    static = StaticBatch.empty(bucket_of(16, 2, 8, False, 64), model.device)
    caches = []

    def encode(packed):
        log.append("encode")
        caches.append(packed.batch.cache)
        return model.encode(packed)

    with monkeypatch.context() as patch:
        patch.setattr(MODULE.torch, "cuda", cuda)
        captured = MODULE.Captured(encode, static)
        captured.begin()
        static.fill(inputs)
        captured.replay()
        captured.end()
        captured.free()
    assert log == [
        "enter device[]", "side waits for current", "enter side[]", "encode", "encode", "leave",
        "current waits for side", "empty_cache", "enter Graph['stream']", "encode", "leave", "leave",
        "current waits for the last replay", "replay", "replay recorded on current", "synchronize", "reset",
    ]  # fmt: skip
    assert captured.nbytes == 64 + static.nbytes() and captured.out.shape == (16, 64)
    assert len({id(cache) for cache in caches}) == 3  # what a warm-up derived from cu_seqlens is not in the graph
