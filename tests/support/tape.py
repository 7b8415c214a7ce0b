"""A tape of operators, which is replayed on the same memory: what a CUDA graph does, without a GPU.

What a capture would write down, a tape holds: the operators in their order, their tensors' memory, and every number
that was Python's at the time. A replay that gives what the step itself gives for other contents of the same buffers has
nothing in it that a graph would repeat wrongly. A registered op of ours is one operator, whatever it launches. Launches
that no registered op makes, those of all layers as one op, are on the tape one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.simulated.no_graphs import NoGraphs


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Tape(TorchDispatchMode):
    """`with tape:` records."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.replays = 0
        self._is_in_an_op = False

    def __enter__(self):
        from triton.runtime.interpreter import GridExecutor

        self._executor, self._launch = GridExecutor, GridExecutor.__call__

        def launch(executor, *args, **kwargs):
            run = partial(self._launch, executor)
            if self._is_in_an_op:
                return run(*args, **kwargs)
            with _disable_current_modes():
                run(*args, **kwargs)
            self.calls.append((run, args, kwargs, None))

        GridExecutor.__call__ = launch
        return super().__enter__()

    def __exit__(self, *raised):
        self._executor.__call__ = self._launch
        return super().__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._is_in_an_op = True
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            self._is_in_an_op = False
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Run all of it once more, with results where they were. Raises AssertionError: one has another shape now."""
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
            for old, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                assert old.shape == new.shape, f"{func} gave {tuple(old.shape)}, and now {tuple(new.shape)}"
                if old.untyped_storage().data_ptr() not in given:  # else a view, or written in place
                    old.copy_(new)


class TapeGraphs(NoGraphs):
    """What captures a GraphedStep in tests: on a tape, on any device."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        tape = Tape()
        self.tapes.append(tape)
        with tape:
            run()
        return tape.replay
