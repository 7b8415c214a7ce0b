"""What repeats launches without Python: CUDA graphs, of inference and of training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

Replay = Callable[[], None]

# Of the process: two captures at once would count on in one random number generator, which torch refuses, and what is
# freed meanwhile would end them.
capturing = threading.Lock()


class Graphs(Protocol):
    """Captures functions whose tensors stay where they are, and repeats them."""

    def unsupported(self, device: torch.device) -> str | None:
        """Why nothing on this device can be captured."""

    def warm(self, run: Callable[[], None]) -> None:
        """Run something that will be captured, so that all is compiled and made that is made once."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """Run it once, and return what runs it again: on the same memory, whatever is in there then."""

    def begin(self) -> None:
        """Before a caller writes what a graph reads: one on another stream may not have ended yet."""

    def end(self) -> None:
        """Behind the last launch that reads what a graph has written."""

    def nbytes(self, replay: Replay | None = None) -> int:
        """What a graph, or all of them, hold beside what was there before."""

    def free(self, replay: Replay | None = None) -> None:
        """This graph, or none of them, is run again."""


class _Held(NamedTuple):
    graph: torch.cuda.CUDAGraph
    nbytes: int


class CudaGraphs:
    """CUDA graphs of one device, which run one after the other.

    All are captured on one stream, to which cuBLAS' scratch memory belongs: 32 MiB, and not that for each graph.
    shares_memory: all graphs use one pool, which goes when the last of them does; else each has its own.
    """

    def __init__(self, device: torch.device, shares_memory: bool = True):
        self.device, self.shares_memory = device, shares_memory
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None  # what the last caller launched
        self._held: dict[Replay, _Held] = {}

    def unsupported(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"the model is on {device.type}"
        if torch.cuda.is_current_stream_capturing():
            return "the caller is capturing a graph"
        return None

    def begin(self) -> None:
        if self._done is not None:
            torch.cuda.current_stream(self.device).wait_event(self._done)

    def end(self) -> None:
        if self._done is None:
            self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(self.device))

    def warm(self, run: Callable[[], None]) -> None:
        with torch.cuda.device(self.device):
            stream, callers = self._own_stream(), torch.cuda.current_stream(self.device)
            self.begin()
            stream.wait_stream(callers)
            with torch.cuda.stream(stream):
                run()
            callers.wait_stream(stream)

    def capture(self, run: Callable[[], None]) -> Replay:
        with capturing, torch.cuda.device(self.device):
            graph, stream = torch.cuda.CUDAGraph(), self._own_stream()
            callers = torch.cuda.current_stream(self.device)
            pool = next(iter(self._held.values())).graph.pool() if self.shares_memory and self._held else None
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # as the capture does: what it then reserves is the graph's own
            before = torch.cuda.memory_reserved(self.device)
            try:
                # thread_local: other threads may allocate meanwhile, on streams that are not captured.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    run()
            finally:
                torch.cuda.set_stream(callers)  # torch leaves the capture's stream set where the capture is invalid
            nbytes = max(0, torch.cuda.memory_reserved(self.device) - before)
        replay: Replay = graph.replay
        self._held[replay] = _Held(graph, nbytes)
        replay()
        return replay

    def nbytes(self, replay: Replay | None = None) -> int:
        return sum(held.nbytes for held in self._held.values()) if replay is None else self._held[replay].nbytes

    def free(self, replay: Replay | None = None) -> None:
        replays = list(self._held) if replay is None else [replay]
        with capturing:
            if replays:
                torch.cuda.synchronize(self.device)  # one may be running
            for each in replays:
                self._held.pop(each).graph.reset()

    def _own_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream
