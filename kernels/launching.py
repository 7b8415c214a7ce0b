"""Launches that Triton's launcher has looked at once.

It looks at every argument of every launch, dozens of them, and makes a text of what it found, to know which of a
kernel's compiled forms is meant: some 20 us of Python. What it goes by are dtypes, whether memory begins at a multiple
of 16 bytes, numbers that it specialises on, and constants. Here the last two are made once for each kind of a call, and
the numbers that change are none that it specialises on. So the dtypes choose the form, and what it knows of one launch
holds for the next. All else goes through Triton's launcher: the first launch, memory at other addresses, hooks of
profilers, the interpreter.
"""

from triton import knobs
from triton.runtime import JITFunction, driver

# What Triton's launcher launches with, in the versions that have been seen; with others it launches everything.
_NAMES = ("run", "function", "packed_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "values")
_KNOWS_FORM = set(_NAMES) <= set(JITFunction.run.__code__.co_names)
_MOST = 4096  # kinds of calls that are kept: strides of tensors are among what they are known by
_made: dict[tuple, "_Launch"] = {}


def forget() -> None:
    """For whoever has changed what constants are made of: a table of blocks."""
    _made.clear()


class Launches:
    """Launches of one kernel. names: of the arguments that each of them brings, tensors (or None), and numbers that the
    kernel says not to specialise on. constants(*key): the others, and the options of the compilation.

    Raises ValueError: a number is specialised on.
    """

    def __init__(self, names: str, constants):
        self.names, self.constants = names.split(), constants

    def __call__(self, kernel, key: tuple, grid: tuple[int, ...], *given) -> None:
        at = (id(kernel), *key)  # a kernel in its place, as tests have it, is another
        launch = _made.get(at)
        if launch is None:
            if len(_made) >= _MOST:
                _made.clear()
            launch = _made[at] = _Launch(kernel, self.names, self.constants(*key))
        launch(grid, given)


class _Launch:
    def __init__(self, kernel, names: list[str], constants: dict):
        self.kernel, self.names, self.constants = kernel, names, constants
        self.compiled: dict[tuple, tuple] = {}
        self.is_fast = _KNOWS_FORM and isinstance(kernel, JITFunction)
        if self.is_fast:
            self.places = [kernel.arg_names.index(name) for name in names]
            self.arguments = [constants.get(name) for name in kernel.arg_names]

    def __call__(self, grid: tuple[int, ...], given: tuple) -> None:
        if not self.is_fast or knobs.runtime.launch_enter_hook.calls or self.kernel.pre_run_hooks:
            self._by_triton(grid, given)
            return
        arguments, bits, kinds = self.arguments.copy(), 0, []
        for place, value in zip(self.places, given, strict=True):
            if value is None:
                kinds.append(None)
            elif type(value) is int:
                arguments[place] = value
                bits |= value >> 31 != 0  # it would be of 64 bits
            else:
                arguments[place] = address = value.data_ptr()
                bits |= address
                kinds.append(value.dtype)
        if bits & 15:
            self._by_triton(grid, given)
            return
        active = driver.active
        device = active.get_current_device()
        kind = (device, *kinds)
        found = self.compiled.get(kind)
        if found is None:
            self.compiled[kind] = self._by_triton(grid, given)
            return
        run, function, metadata = found
        run(
            grid[0], grid[1] if len(grid) > 1 else 1, 1, active.get_current_stream(device), function, metadata, None,
            None, None, *arguments,
        )  # fmt: skip

    def _by_triton(self, grid: tuple[int, ...], given: tuple) -> tuple:
        """What launches the compiled form again."""
        kernel = self.kernel[grid](**dict(zip(self.names, given, strict=True)), **self.constants)
        if not self.is_fast:
            return ()
        for name, value, place in zip(self.names, given, self.places, strict=True):
            if type(value) is int and not self.kernel.params[place].do_not_specialize:
                raise ValueError(f"{self.kernel.__name__} is compiled for each kind of {name}")
        return kernel.run, kernel.function, kernel.packed_metadata
