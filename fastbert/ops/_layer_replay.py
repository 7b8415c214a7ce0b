"""Layers as one op on a batch of a size that came before: what was called then is called again (_recorded_calls.py).

What a step's host does for layers is mostly making memory, views of it, and what launches take. All of it goes by the
plan and the sizes of a batch. So the second batch of a size is recorded, and those behind it have launches and products
alone. The first one is not: of batches that differ, most sizes come once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastbert.ops._layer_memory import weights_memory
from fastbert.ops._layer_plan import Plan
from fastbert.ops._recorded_calls import Calls, Memory, Recording, are_aligned

_MOST = 32  # sizes that are known: of each there are some thousand Python objects, and no memory of a device


class Recorded:
    """Both directions of a plan's layers on batches of one size: a forward has it until its backward is over.

    What is recorded: run_forward(x, form, recording) gives out and what is kept, run_backward(dout, x, kept, form,
    needs_dx, recording) dx, the gradients of weights in x's dtype, and those of vectors. form: the registered op's;
    others: its tensors beside x and the memory of weights, each once.
    """

    def __init__(self, key: tuple, run_forward: Callable[..., Any], run_backward: Callable[..., Any]):
        self._key, self._run_forward, self._run_backward = key, run_forward, run_backward
        self._forward: Calls | None = None
        self._backward: Calls | None = None
        self._reason: str | None = None  # why it cannot be called again
        self._weights: Sequence[torch.Tensor] = ()
        self._of_weights: list[Memory] = []
        self._kept: Sequence[torch.Tensor] = ()
        self._dweights: torch.Tensor | None = None  # where they are cast behind backward

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks at launches of one of its kernels."""
        return any([k.pre_run_hooks for calls in (self._forward, self._backward) if calls for k in calls.kernels])

    def weights_memory(self, plan: Plan, x: torch.Tensor, vectors: torch.dtype) -> Sequence[torch.Tensor]:
        """See _layer_memory.weights_memory."""
        for memory in self._of_weights:
            memory.make()
        if not self._weights:
            self._weights = weights_memory(plan, x, vectors)
            self._of_weights = [Memory(t) for t in self._weights]
        return self._weights

    def forward(self, x: torch.Tensor, form: Any, others: Sequence[torch.Tensor]) -> torch.Tensor:
        given = [x, *others]
        if self._forward is not None:
            (out,) = self._forward.run(given)
        else:
            with Recording() as recording:
                out, self._kept = self._run_forward(x, form, recording)
            self._forward = self._calls(recording, given, [out], self._of_weights, self._kept)
        if self._forward is not None:
            self._forward.release()
        return out  # type: ignore[no-any-return]

    def backward(
        self, dout: torch.Tensor, x: torch.Tensor, form: Any, others: Sequence[torch.Tensor], needs_dx: bool
    ) -> list[Any]:
        """As the registered op, but that dx may be anything unless needs_dx."""
        dtype, dout = self._weights[1].dtype, dout.contiguous()
        dout = dout if are_aligned(dout) else dout.clone()
        casts, given = dtype is not x.dtype, [dout, x, *others]
        if self._backward is not None:
            dx, dweights, *vectors = self._backward.run(given)
        else:
            with Recording() as recording:
                dx, dweights, *vectors = self._run_backward(dout, x, self._kept, form, needs_dx, recording)
            results = [dx if needs_dx else None, None if casts else dweights, *vectors]
            if self._forward is not None:
                held = [*self._of_weights, *self._forward.kept_memory]
                self._backward = self._calls(recording, given, results, held)
            self._dweights = dweights if casts else None
        dweights = self._dweights.to(dtype) if self._dweights is not None else dweights
        self._release()
        return [dx, dweights, *vectors]

    def _release(self) -> None:
        if self._backward is not None:
            self._backward.release()
        if torch._C._autograd._get_current_graph_task_keep_graph():  # what forward kept may be wanted again
            return
        if self._forward is not None:
            for memory in reversed([*self._of_weights, *self._forward.kept_memory]):
                memory.release()
        _give_back(self._key, self if self._reason is None else None)

    def _calls(
        self,
        recording: Recording,
        given: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor | None],
        held: Sequence[Memory],
        kept: Sequence[torch.Tensor] = (),
    ) -> Calls | None:
        if recording.reason is None:
            try:
                return Calls(recording, given, results, held, kept)
            except ValueError as error:
                recording.reason = str(error)
        self._reason = recording.reason
        return None


_lock = threading.Lock()
# Those that nobody has, by what they go by; None: they cannot be called again.
_known: dict[tuple, list[Recorded] | None] = {}


def take(key: tuple, run_forward: Callable[..., Any], run_backward: Callable[..., Any]) -> Recorded | None:
    """key: all that calls go by. None: the layers run by the registered op."""
    with _lock:
        if key not in _known:
            while len(_known) >= _MOST:
                del _known[next(iter(_known))]
            _known[key] = []
            return None
        spare = _known[key] = _known.pop(key)  # is the last one to go
        if spare is None:
            return None
        recorded = spare.pop() if spare else Recorded(key, run_forward, run_backward)
    return None if recorded.is_watched else recorded


def _give_back(key: tuple, recorded: Recorded | None) -> None:
    with _lock:
        if recorded is None:
            _known[key] = None
        elif (spare := _known.get(key)) is not None:
            spare.append(recorded)
