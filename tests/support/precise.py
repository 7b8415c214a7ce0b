"""Numbers that another library gives, too: theirs in float32 are the error rule's baseline, in float64 its oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference


def assert_as_theirs(ours: Any, theirs: Any, call: Callable[[Any], Any]) -> Any:
    """`call(ours)`, which is returned, against `call(theirs)`: the types, shapes and dtypes, too.

    `theirs` is a module, or a pipeline, whose `model` is one.
    """
    found, near = call(ours), call(theirs)
    assert_close_to_theirs(found, near, call(in_float64(theirs)))
    return found


def in_float64(theirs: Any) -> Any:
    """A copy of a module, or of a pipeline."""
    theirs = copy.deepcopy(theirs)
    (theirs if isinstance(theirs, torch.nn.Module) else theirs.model).double()
    return theirs


def assert_close_to_theirs(found: Any, near: Any, exact: Any) -> None:
    """Arrays, tensors, lists of them or of numbers; those of a list of numbers count as float32."""
    assert type(found) is type(near)
    rows = [list(parts_of(*each)) for each in ((found, torch.float32), (near, torch.float32), (exact, torch.float64))]
    for one, baseline, oracle in zip(*rows, strict=True):
        assert one.shape == baseline.shape and one.dtype == baseline.dtype and one.is_sparse == baseline.is_sparse
        one, baseline, oracle = (t.to_dense() if t.is_sparse else t for t in (one, baseline, oracle))
        assert_close_to_reference(one, oracle.double(), baseline, GRADIENT_FACTOR)


def parts_of(found: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The tensors of a result; lists of numbers are in `dtype`."""
    if isinstance(found, list) and found and isinstance(found[0], float):
        yield torch.tensor(found, dtype=dtype)
    elif isinstance(found, list):
        for part in found:
            yield from parts_of(part, dtype)
    else:
        yield torch.from_numpy(found) if isinstance(found, np.ndarray) else found
