"""A word that a training loop of ours gives, inside of which ops may do less: PyTorch records all writes to weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastbert.native.availability import extension_error


@contextmanager
def only_recorded_writes() -> Iterator[None]:
    """Inside, and in this thread, PyTorch records every write to a weight: optimizers, operations in place.

    The kernels then need not read all of every weight at each call to see whether it is still what they have packed
    (docs/gemm.md). For loops of our own; in torch.inference_mode it is so anyway.
    """
    if extension_error() is not None:  # nothing is packed
        yield
        return
    from fastbert import _C

    before = _C.only_recorded_writes()
    _C.set_only_recorded_writes(True)
    try:
        yield
    finally:
        _C.set_only_recorded_writes(before)
