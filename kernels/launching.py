"""Launches that Triton's launcher has looked at once.

It looks at every argument of every launch, dozens of them, and makes a text of what it found, to know which of a
kernel's compiled forms is meant: some 20 us of Python. What it goes by are dtypes, whether memory begins at a multiple
of 16 bytes, numbers that it specialises on, and constants. Here the last two are made once for each kind of a call, and
the numbers that change are none that it specialises on. So the dtypes choose the form, and what it knows of one launch
holds for the next. All else goes through Triton's launcher: memory at other addresses, hooks of profilers, the
interpreter.

Launches that differ in nothing but their tensors, those of layers that are alike, are bound once (`Launches.bind`).
"""

from triton import knobs
from triton.runtime import JITFunction, MockTensor, driver

# What Triton's launcher launches with, in the versions that have been seen; with others it launches everything.
_NAMES = ("run", "function", "packed_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "values")
_KNOWS_LAUNCHER = set(_NAMES) <= set(JITFunction.run.__code__.co_names)
_MOST = 4096  # kinds of calls that are kept: strides of tensors are among what they are known by
_launches: dict[tuple, "_Launch"] = {}


def forget() -> None:
    """For whoever has changed what constants are made of: a table of blocks."""
    _launches.clear()


class Launches:
    """Launches of one kernel. names: of its pointers, which come first; numbers: of the others that a call brings,
    which the kernel says not to specialise on. constants(*key): the rest, and the options of the compilation.

    Raises ValueError: a number is specialised on, or pointers do not come first.
    """

    def __init__(self, names: str, constants, numbers: str = ""):
        self.names, self.constants, self.numbers = names.split(), constants, numbers.split()

    def bind(self, kernel, key: tuple, grid: tuple[int, ...], *numbers: int) -> "Bound":
        at = (id(kernel), *key)  # a kernel in its place, as tests have it, is another
        launch = _launches.get(at)
        if launch is None:
            if len(_launches) >= _MOST:
                _launches.clear()
            launch = _launches[at] = _Launch(kernel, self.names, self.numbers, self.constants(*key))
        return Bound(launch, grid, numbers)


class Bound:
    """A launch of a kernel but for its pointers: called with tensors, or None."""

    def __init__(self, launch: "_Launch", grid: tuple[int, ...], numbers: tuple[int, ...]):
        self.launch, self.grid, self.numbers = launch, grid, numbers

    def __call__(self, *tensors) -> None:
        addresses, dtypes, bits = [], [], 0
        for t in tensors:
            if t is None:
                addresses.append(None)
                dtypes.append(None)
            else:
                address = t.data_ptr()
                addresses.append(address)
                dtypes.append(t.dtype)
                bits |= address
        if bits & 15 or not self.launch.is_fast or self._is_watched() or self._has_wide_numbers():
            self.launch.by_triton(self.grid, self.numbers, tensors)
            return
        active, (x, y) = driver.active, (*self.grid, 1)[:2]
        device = active.get_current_device()
        run, function, metadata = self.launch.compiled_for(device, dtypes, self.grid, self.numbers)
        rest = self.launch.with_numbers(self.numbers)
        run(x, y, 1, active.get_current_stream(device), function, metadata, None, None, None, *addresses, *rest)

    def _is_watched(self) -> bool:
        return bool(knobs.runtime.launch_enter_hook.calls or self.launch.kernel.pre_run_hooks)

    def _has_wide_numbers(self) -> bool:
        return any([number + 2**31 >> 32 for number in self.numbers])  # of 64 bits


class _Launch:
    def __init__(self, kernel, names: list[str], numbers: list[str], constants: dict):
        self.kernel, self.names, self.numbers, self.constants = kernel, names, numbers, constants
        self.compiled: dict[tuple, tuple] = {}
        self.is_fast = _KNOWS_LAUNCHER and isinstance(kernel, JITFunction)
        if self.is_fast:
            rest = kernel.arg_names[len(names) :]
            if kernel.arg_names[: len(names)] != names:
                raise ValueError(f"{kernel.__name__} has {kernel.arg_names}, whose first are not {names}")
            for name in numbers:
                if not kernel.params[kernel.arg_names.index(name)].do_not_specialize:
                    raise ValueError(f"{kernel.__name__} is compiled for each kind of {name}")
            self.rest = [constants.get(name) for name in rest]  # what stands behind the pointers
            self.indices = [rest.index(name) for name in numbers]

    def with_numbers(self, numbers: tuple[int, ...]) -> list:
        rest = self.rest.copy()
        for index, number in zip(self.indices, numbers, strict=True):
            rest[index] = number
        return rest

    def compiled_for(self, device: int, dtypes, grid: tuple[int, ...], numbers: tuple[int, ...]) -> tuple:
        """What launches the kernel as it is compiled for these dtypes, and for addresses that are multiples of 16."""
        key = (device, *dtypes)
        entry = self.compiled.get(key)
        if entry is None:
            mocks = [None if dtype is None else MockTensor(dtype) for dtype in dtypes]
            kernel = self._call(self.kernel.warmup, mocks, numbers, grid=grid)
            entry = self.compiled[key] = kernel.run, kernel.function, kernel.packed_metadata
        return entry

    def by_triton(self, grid: tuple[int, ...], numbers: tuple[int, ...], tensors) -> None:
        self._call(self.kernel[grid], tensors, numbers)

    def _call(self, call, tensors, numbers: tuple[int, ...], **options):
        arguments = zip((*self.names, *self.numbers), (*tensors, *numbers), strict=True)
        return call(**dict(arguments), **self.constants, **options)
