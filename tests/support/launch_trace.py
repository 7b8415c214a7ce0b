"""What a step would launch on a GPU, written down without one, and what a CUDA graph could not hold of it.

A line of a trace is a launch of a Triton kernel or an operator of torch: its name, its numbers, and where its tensors
lie: which buffer, how many bytes into it. A graph repeats just these. So steps whose traces are equal may be one graph,
whatever lies in their buffers; where a line differs, a graph would go by the step that it was captured in.

A buffer that was there before the step has the name that it was given; one that the step makes is #7, the eighth that
it makes. Names are of memory and not of addresses, which the next tensor may get. What a table of addresses holds is
the contents of a buffer, and in no trace.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import triton
from host_syncs import HostSyncs
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from dry_launches import DryDriver

# Beside views, what gives a tensor and launches nothing.
FREE = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"))


@dataclass
class Trace:
    """One step's. launches: lines, in their order. allocations: bytes, in their order. waits: for a value. decided:
    draws, and tensors made of Python's numbers, which a graph would repeat. left: memory that the step has made, or
    that has grown in it, and that outlives it.
    """

    launches: list[str] = field(default_factory=list)
    allocations: list[int] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    decided: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def forbidden(self) -> list[str]:
        """What a capture forbids."""
        return self.waits + self.decided

    def counts(self) -> Counter[str]:
        """Launches by name."""
        return Counter(re.split(r"[\[(]", line, maxsplit=1)[0] for line in self.launches)


def differences(one: Trace, other: Trace) -> list[str]:
    """Launches and allocations in which two steps differ, each with its place."""
    pairs = [
        *enumerate(zip_longest(one.launches, other.launches)),
        *enumerate(zip_longest(one.allocations, other.allocations)),
    ]
    return [f"{i}: {a} | {b}" for i, (a, b) in pairs if a != b]


@dataclass
class _Named:
    """A weak reference does not keep memory alive, and no other memory has its number as long as there is one."""

    reference: StorageWeakRef
    name: str
    size: int
    is_made: bool  # by the step that goes on
    address: int


class Memory:
    """Names of what tensors lie in."""

    def __init__(self) -> None:
        self._named: dict[int, _Named] = {}
        self._made = self._met = 0  # by this step; elsewhere, without a name, in all steps

    def name(self, t: torch.Tensor, name: str, is_made: bool = False) -> bool:
        """Whether t's memory had no name yet: the first one stays."""
        storage = t.untyped_storage()
        if storage._cdata in self._named:
            return False
        named = _Named(StorageWeakRef(storage), name, storage.nbytes(), is_made, storage.data_ptr())
        self._named[storage._cdata] = named
        return True

    def name_made(self, t: torch.Tensor) -> bool:
        """For what comes out of an operator. Whether its memory is new."""
        is_new = self.name(t, f"#{self._made}", is_made=True)
        self._made += is_new
        return is_new

    def place(self, t: torch.Tensor) -> str:
        """The name of what t lies in, and the byte at which it begins."""
        if self.name(t, f"unnamed {self._met}"):
            self._met += 1
        return f"{self._named[t.untyped_storage()._cdata].name}+{t.storage_offset() * t.element_size()}"

    def place_at(self, address: int) -> str:
        """As `place`, of a launch that brings addresses: what lies there now."""
        for named in reversed(self._named.values()):
            if named.address <= address < named.address + named.size and not named.reference.expired():
                return f"{named.name}+{address - named.address}"
        return f"nothing that is known, at {address}"

    def end_step(self, number: int) -> list[str]:
        """What is alive of what the step has made, from now on named after it, and what has grown."""
        self._named = {key: named for key, named in self._named.items() if not named.reference.expired()}
        self._made, left = 0, []
        for named in self._named.values():
            size = torch.UntypedStorage._new_with_weak_ptr(named.reference.cdata).nbytes()
            if named.is_made:
                named.name, named.is_made = f"{named.name} of step {number}", False
                left.append(f"{named.name}: {size} bytes")
            elif size > named.size:
                left.append(f"{named.name}: {named.size} bytes, and now {size}")
            named.size = size
        return left


class Address(int):
    """A pointer of a launch, where that brings no tensor."""


class Launches:
    """Of Triton: tells one listener of each, by a line's beginning and the arguments."""

    def __init__(self, dry: DryDriver):
        self._dry = dry
        self._tell: Callable[[str, dict[str, Any]], None] | None = None

    @contextmanager
    def told_to(self, listener: Callable[[str, dict[str, Any]], None]) -> Iterator[None]:
        self._tell = listener
        try:
            yield
        finally:
            self._tell = None

    def compile(self, source: Any, target: Any, options: dict[str, Any]) -> _Uncompiled:
        return _Uncompiled(self, source, options)

    def launch(self, kernel: _Uncompiled, grid: tuple[int, int, int], values: tuple) -> None:
        source = kernel.source
        self._dry.launch(source.name, *grid)
        if self._tell is not None:
            given = dict(zip(source.fn.arg_names, values, strict=True))
            for name, value in given.items():
                if type(value) is int and source.signature[name].startswith("*"):  # kernels/launching.py
                    given[name] = Address(value)
                elif hasattr(value, "data_ptr") and not isinstance(value, torch.Tensor):
                    given[name] = Address(value.data_ptr())
            self._tell(f"{source.name}{[*grid]} {kernel.kind}", given)


class _Uncompiled:
    """Stands where Triton keeps a compiled kernel."""

    function = packed_metadata = None

    def __init__(self, launches: Launches, source: Any, options: dict[str, Any]):
        self._launches, self.source = launches, source
        # What it would be compiled for beside its arguments' values: another kernel is another node of a graph.
        types, aligned = ",".join(source.signature.values()), ",".join(str(path[0]) for path in source.attrs)
        self.kind = f"warps {options['num_warps']}, stages {options['num_stages']}, {types}, aligned {aligned}"

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, *others: Any) -> None:
        """others: stream, function, packed metadata, launch metadata, two hooks, and the kernel's arguments."""
        self._launches.launch(self, (x, y, z), others[6:])


def without_compiler(dry: DryDriver) -> Launches:
    """From here on a launch goes as far as it says which kernel it wants, and nothing is compiled: a second a kernel,
    and what comes of it, the facts of `dry_launches.py` tell.
    """
    launches = Launches(dry)
    triton.compiler.compile = launches.compile
    return launches


@contextmanager
def _own_circles_collected() -> Iterator[None]:
    """What a step makes stays young, so that circles of it are found without a look at all that there is."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.collect(0)
    finally:
        if was_on:
            gc.enable()


class Recorder(TorchDispatchMode):
    """Writes down steps that run on a dry driver: `with recorder.step() as trace: run()`.

    One recorder goes with what it has named; others may take turns with it, also within a step: `with first.paused(),
    second.step() as trace: run()`.
    """

    def __init__(self, launches: Launches):
        super().__init__()
        self._launches, self._steps = launches, 0
        self._memory, self._trace, self._open = Memory(), Trace(), ExitStack()

    def name(self, tensors: dict[str, torch.Tensor]) -> None:
        """What was there before the steps."""
        for name, t in tensors.items():
            self._memory.name(t, name)

    @contextmanager
    def step(self) -> Iterator[Trace]:
        self._trace = trace = Trace()
        generator = torch.get_rng_state()
        with _own_circles_collected(), self._open:
            self._open.enter_context(self._recording())
            yield trace
        trace.left += self._memory.end_step(self._steps)
        if not torch.equal(torch.get_rng_state(), generator):
            trace.decided.append("torch's generator has moved on")
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no part of the step that goes on."""
        self._open.close()
        yield
        self._open.enter_context(self._recording())

    @contextmanager
    def _recording(self) -> Iterator[None]:
        with self._launches.told_to(self._launch), HostSyncs() as waits, self:
            yield
        self._trace.waits += waits.found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # what is made of others is these, and an op of ours what its kernels' function does
            if func.namespace == "fastbert":
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        given = [*map(self._text, args), *(f"{name}={self._text(value)}" for name, value in kwargs.items())]
        out = func(*args, **kwargs)
        self._note(func, given, out)
        return out

    def _note(self, func: Any, given: list[str], out: Any) -> None:
        """given: before the operator ran, when what it makes had no name."""
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags or name == "lift_fresh":
            self._trace.decided.append(str(func))
        if func.is_view or func.namespace == "profiler":
            return
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]  # what else comes out is a value
        for t in results:
            if self._memory.name_made(t):
                self._trace.allocations.append(t.untyped_storage().nbytes())
        if name not in FREE:
            self._trace.launches.append(f"{func}({', '.join(given)}) -> {self._text(results)}")

    def _launch(self, beginning: str, arguments: dict[str, Any]) -> None:
        def text(value: Any) -> str:
            if isinstance(value, Address):
                return self._memory.place_at(value)
            return self._memory.place(value) if isinstance(value, torch.Tensor) else repr(value)

        texts = (f"{name}={text(value)}" for name, value in arguments.items())
        self._trace.launches.append(f"{beginning}({', '.join(texts)})")

    def _text(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, torch.Tensor):
            return f"{self._memory.place(value)} {str(value.dtype)[6:]}{[*value.shape]} by {[*value.stride()]}"
        return repr(value)
