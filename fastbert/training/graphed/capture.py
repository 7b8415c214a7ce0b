"""What repeats the launches of a step without Python: CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from fastbert.cuda_graphs import capturing


class Graphs(Protocol):
    """Captures functions whose tensors stay where they are, and repeats them."""

    def unsupported(self, device: torch.device) -> str | None:
        """Why nothing on this device can be captured."""

    def warm(self, run: Callable[[], None]) -> None:
        """Run something that will be captured, so that all is compiled and made that is made once."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run it once, and return what runs it again: on the same memory, whatever is in there then."""

    def nbytes(self) -> int:
        """What the graphs hold, beside what was there before."""

    def free(self) -> None:
        """Nobody runs again what was captured."""


class CudaGraphs:
    """CUDA graphs of one device in one pool of memory: they run one after the other, so each may use all of it.

    All are captured on one stream, to which cuBLAS' scratch memory belongs.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._nbytes = 0

    def unsupported(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"the model is on {device.type}"
        if torch.cuda.is_current_stream_capturing():
            return "the caller is capturing a graph"
        return None

    def warm(self, run: Callable[[], None]) -> None:
        stream, callers = self._own_stream(), torch.cuda.current_stream()
        stream.wait_stream(callers)
        with torch.cuda.stream(stream):
            run()
        callers.wait_stream(stream)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        graph, stream, callers = torch.cuda.CUDAGraph(), self._own_stream(), torch.cuda.current_stream()
        pool = self._graphs[0].pool() if self._graphs else None
        with capturing:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # as the capture does: what it then reserves is the graph's own
            before = torch.cuda.memory_reserved()
            try:
                # thread_local: threads that read batches may allocate meanwhile.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    run()
            finally:
                torch.cuda.set_stream(callers)  # torch leaves the capture's stream set where the capture is invalid
            self._nbytes += max(0, torch.cuda.memory_reserved() - before)
        self._graphs.append(graph)
        graph.replay()
        return graph.replay

    def nbytes(self) -> int:
        return self._nbytes

    def free(self) -> None:
        with capturing:
            if self._graphs:
                torch.cuda.synchronize()  # one may be running
            for graph in self._graphs:
                graph.reset()
        self._graphs.clear()
        self._nbytes = 0

    def _own_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream
