"""Launches and products of a run on tensors, recorded to be called again on others: no Python is left between them.

A run that goes by the sizes of its tensors alone, and not by what is in them, calls the same on the next tensors of
these sizes. All that differs is where memory lies. As for a CUDA graph's capture and replay, but each call is made by
the host, which no setting of the process forbids, and between two runs no memory is held.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_aten = torch.ops.aten
# What makes memory; and what is called again, by torch's own functions, which take half of an overload's time.
_MAKE = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default}
_AGAIN: dict[Any, Callable[..., Any]] = {
    _aten.mm.out: torch.mm,
    _aten.addmm.out: torch.addmm,
    _aten.addmm_.default: torch.Tensor.addmm_,
    _aten.sum.IntList_out: torch.sum,
}
_ALIGNED = 16  # bytes: kernels are launched without a look on addresses that are multiples of that


def is_seen(x: torch.Tensor) -> bool:
    """Whether somebody looks at operators, captures them, or takes for himself what they save for backward."""
    is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return is_captured or has_hooks or torch._C._len_torch_dispatch_stack() > 0


def are_aligned(*tensors: torch.Tensor) -> bool:
    """Whether launches on them are launches on any tensors that begin at such addresses."""
    return not any([t.data_ptr() % _ALIGNED for t in tensors])


class Memory:
    """Memory of tensors that stay. It is there between `make` and `release` only."""

    def __init__(self, t: torch.Tensor):
        self.storage = t.untyped_storage()
        self.size = self.storage.nbytes()

    def make(self) -> None:
        self.storage.resize_(self.size)

    def release(self) -> None:
        self.storage.resize_(0)


class Recording(TorchDispatchMode):
    """Inside, products and what makes memory are recorded, and launches of what `launching` gives.

    reason: why it cannot be called again. The run itself is not changed by that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], list[Any], dict[str, Any]]] = []
        self.made: list[torch.Tensor] = []
        self.kernels: list[Any] = []
        self.addresses: list[tuple[list[Any], int]] = []  # a call's arguments, and where an address is among them
        self.reason: str | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _AGAIN:
            self.calls.append((_AGAIN[func], [*args], dict(kwargs)))
        elif func in _MAKE:
            self.made.append(result)
        elif not func.is_view:
            self.reason = f"nobody knows how to call {func} again"
        return result

    def launching(self, bound: Any, dtypes: Sequence[torch.dtype | None] | None) -> Callable[..., None]:
        """A launch of kernels/launching.py on addresses of tensors of these dtypes, or, without dtypes, on tensors."""
        if dtypes is None:
            return lambda *tensors: self._launch(bound, tensors)
        launch, around = bound.by_address(*dtypes), bound.around_addresses(*dtypes)
        if around is None:
            self.reason = "somebody looks at launches"
            return launch  # type: ignore[no-any-return]
        self.kernels.append(bound.launch.kernel)
        run, before, behind = around

        def recorded(*addresses: int | None) -> None:
            launch(*addresses)
            arguments = [*before, *addresses, *behind]
            self.calls.append((run, arguments, {}))
            for place, address in enumerate(addresses, len(before)):
                if address:  # nothing lies at 0
                    self.addresses.append((arguments, place))
                    if address % _ALIGNED:
                        self.reason = f"a tensor does not begin at a multiple of {_ALIGNED} bytes"

        return recorded

    def _launch(self, bound: Any, tensors: tuple[torch.Tensor | None, ...]) -> None:
        with _disable_current_modes():  # Triton's interpreter computes with operators
            bound(*tensors)
        self.calls.append((bound, [*tensors], {}))


class _View(NamedTuple):
    """A tensor among a call's arguments: offset elements behind the one that it is a view of."""

    arguments: Any
    place: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Uses:
    """Where calls take what lies elsewhere in the next run: addresses, which have moved with its first one, and views
    of it.
    """

    def __init__(self) -> None:
        self.first = 0
        self.addresses: list[tuple[list[Any], int, int]] = []  # arguments, place, bytes behind the first one
        self.views: list[_View] = []
        self.are_rows = False  # the views: all rows of one tensor

    def move(self, first: int) -> None:
        if first != self.first:
            self.first = first
            for arguments, place, offset in self.addresses:
                arguments[place] = first + offset

    def show(self, t: torch.Tensor) -> None:
        self.move(t.data_ptr())
        if self.are_rows:  # made at once, in a third of the time
            for view, row in zip(self.views, t.unbind(), strict=True):
                view.arguments[view.place] = row
        else:
            start = t.storage_offset()
            for arguments, place, size, stride, offset in self.views:
                arguments[place] = t.as_strided(size, stride, start + offset)

    def hide(self) -> None:
        """That no tensor is held until the next run."""
        for view in self.views:
            view.arguments[view.place] = None

    def finish(self, t: torch.Tensor) -> None:
        """All uses of t are known."""
        self.views.sort(key=lambda view: view.offset)
        rows = [(row.shape, row.stride(), i * t.stride(0)) for i, row in enumerate(t.unbind() if t.dim() > 1 else ())]
        self.are_rows = len(rows) > 0 and rows == [(view.size, view.stride, view.offset) for view in self.views]
        self.hide()


class Calls:
    """What a recording recorded, and the tensors that it goes by.

    given: those that each run brings, none of which is part of another. results: those that are returned, which were
    made inside, each by itself, and are made anew for each run; None stays None. held: memory of tensors that an
    earlier recording made, and that is there while this one runs. kept: tensors made inside whose memory stays behind a
    run, until the caller releases it (kept_memory); all other memory is `release`d.

    Raises ValueError: something is called on a tensor that is none of these.
    """

    def __init__(
        self,
        recording: Recording,
        given: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor | None],
        held: Sequence[Memory] = (),
        kept: Sequence[torch.Tensor] = (),
    ):
        self.kernels, self._calls = recording.kernels, recording.calls
        self._results = [None if t is None else (t.shape, t.dtype) for t in results]
        made = {_storage_of(t): Memory(t) for t in recording.made}
        returned = [t for t in results if t is not None]
        for t in returned:
            memory = made.pop(_storage_of(t), None)
            if memory is None or _num_bytes(t) != memory.size:
                raise ValueError("a result was not made inside by itself")
        self.kept_memory = [made.pop(at) for at in {_storage_of(t) for t in kept} & made.keys()]
        self._scratch = [*made.values()]
        self._memories = [*held, *self._scratch, *self.kept_memory]
        self._of_memories = [_Uses() for _ in self._memories]
        self._of_tensors = [_Uses() for _ in (*given, *returned)]
        self._find_uses(recording.addresses, (*given, *returned))

    def _find_uses(self, addresses: Sequence[tuple[list[Any], int]], tensors: Sequence[torch.Tensor]) -> None:
        spans = [(t.data_ptr(), _num_bytes(t), uses) for t, uses in zip(tensors, self._of_tensors, strict=True)]
        for memory, uses in zip(self._memories, self._of_memories, strict=True):
            spans.append((memory.storage.data_ptr(), memory.size, uses))
        spans = sorted([span for span in spans if span[1] > 0], key=lambda span: span[0])
        starts = [start for start, _, _ in spans]
        for (start, size, _), after in zip(spans, starts[1:], strict=False):
            if start + size > after:
                raise ValueError("a tensor is part of another")
        for start, _, uses in spans:
            uses.first = start

        def owner(address: int) -> tuple[_Uses, int]:
            """And how far behind its beginning."""
            start, size, uses = spans[bisect_right(starts, address) - 1]
            if not start <= address < start + size:
                raise ValueError("something is called on a tensor that is neither given nor made")
            return uses, address - start

        for arguments, place in addresses:
            uses, offset = owner(arguments[place])
            uses.addresses.append((arguments, place, offset))
        that_stay = {id(uses) for uses in self._of_memories}
        for arguments, place, t in _tensors_of(self._calls):
            if t.numel():
                uses, offset = owner(t.data_ptr())
                if id(uses) not in that_stay:
                    view = _View(arguments, place, tuple(t.shape), t.stride(), offset // t.element_size())
                    uses.views.append(view)
        for uses, t in zip(self._of_tensors, tensors, strict=True):
            uses.finish(t)

    def run(self, given: Sequence[torch.Tensor]) -> list[Any]:
        """The results. given: of the same sizes, strides and dtypes as the first ones, and `are_aligned`."""
        for memory in (*self._scratch, *self.kept_memory):
            memory.make()
        results = [None if each is None else given[0].new_empty(each[0], dtype=each[1]) for each in self._results]
        for uses, memory in zip(self._of_memories, self._memories, strict=True):
            uses.move(memory.storage.data_ptr())
        tensors = (*given, *[t for t in results if t is not None])
        for uses, t in zip(self._of_tensors, tensors, strict=True):
            uses.show(t)
        for function, arguments, options in self._calls:
            if options:
                function(*arguments, **options)
            else:  # a launch: no dict is made for it
                function(*arguments)
        for uses in self._of_tensors:
            uses.hide()
        return results

    def release(self) -> None:
        for memory in reversed(self._scratch):
            memory.release()


def _storage_of(t: torch.Tensor) -> int:
    """As a name, while t lives."""
    return t.untyped_storage()._cdata


def _num_bytes(t: torch.Tensor) -> int:
    """From its first element to its last one."""
    if t.numel() == 0:
        return 0
    return (sum([(size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True)]) + 1) * t.element_size()


def _tensors_of(calls: Sequence[tuple[Any, list[Any], dict[str, Any]]]) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Arguments or options, and where there is which tensor."""
    for _, arguments, options in calls:
        for where, items in ((arguments, enumerate(arguments)), (options, options.items())):
            for place, t in items:  # type: ignore[attr-defined]
                if isinstance(t, torch.Tensor):
                    yield where, place, t
