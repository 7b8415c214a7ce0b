"""What batches travel on: a stream of its own beside that of the steps on a GPU, and nothing on a CPU."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Protocol

import torch

from fastbert.packed_inputs import PackedInputs

PAUSE_S = 1e-4


class Lane(Protocol):
    """Copies to a device beside the steps that it runs. Nothing here waits for the device but `pause`, for a moment.

    An event is what `copy` and `record` return: it has happened when all that was launched before it is done.
    """

    def lock(self, memory: torch.Tensor) -> str | None:
        """Page-lock memory of the host, so that copies from it go on while the host does. Returns why it cannot be."""

    def unlock(self, memory: torch.Tensor) -> None:
        """Undo `lock`, before the memory goes."""

    def pinned(self, packed: PackedInputs) -> PackedInputs:
        """A batch that no block holds, in memory from which copies go on while the host does."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Launch a copy to the device behind all earlier ones; returns the event of its end."""

    def record(self) -> Any:
        """The event that the steps launched so far have ended."""

    def copies_wait(self, event: Any) -> None:
        """Copies that are launched later begin behind this event."""

    def steps_wait(self, event: Any) -> None:
        """What steps launch later begins behind this event."""

    def is_done(self, event: Any) -> bool:
        """Whether it has happened. This does not wait."""

    def pause(self) -> None:
        """Let the device go on for a moment, where the host has nothing to do before it has."""


class HostLane:
    """Where steps run on the CPU: a copy is done when it has been launched."""

    def lock(self, memory: torch.Tensor) -> str | None:
        return None

    def unlock(self, memory: torch.Tensor) -> None:
        pass

    def pinned(self, packed: PackedInputs) -> PackedInputs:
        return packed

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def record(self) -> None:
        pass

    def copies_wait(self, event: None) -> None:
        pass

    def steps_wait(self, event: None) -> None:
        pass

    def is_done(self, event: None) -> bool:
        return True

    def pause(self) -> None:
        pass


class CudaLane:
    """A stream for copies. Steps are on the stream that is the current one when they are launched."""

    def __init__(self, device: torch.device):
        self._device, self._copies = device, torch.cuda.Stream(device)

    def lock(self, memory: torch.Tensor) -> str | None:
        cudart = torch.cuda.cudart()
        error = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(error) == 0:
            return None
        with suppress(RuntimeError):  # CUDA keeps the error for whoever launches next: this takes it
            torch.zeros((), device=self._device)
        return cudart.cudaGetErrorString(error)

    def unlock(self, memory: torch.Tensor) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))

    def pinned(self, packed: PackedInputs) -> PackedInputs:
        return packed.pin_memory()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
        return self._copies.record_event()

    def record(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self._device).record_event()

    def copies_wait(self, event: torch.cuda.Event) -> None:
        self._copies.wait_event(event)

    def steps_wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def is_done(self, event: torch.cuda.Event) -> bool:
        return event.query()

    def pause(self) -> None:
        time.sleep(PAUSE_S)


def lane_to(device: torch.device) -> Lane:
    return CudaLane(device) if device.type == "cuda" else HostLane()
