"""The `cpu` backend once for each instruction set that it has code for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fastbert.ops._library import extension_error

ISAS = ("generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16")


@contextmanager
def run_isa(isa: str) -> Iterator[None]:
    """Within the block the C++ kernels run with `isa`, and find NaN in memory that they have not written.

    A visible skip where this machine cannot run it.
    """
    if extension_error() is not None:
        pytest.skip(extension_error())
    from fastbert import _C

    if isa not in _C.isas():
        pytest.skip(f"this CPU cannot run {isa} (it can run {', '.join(_C.isas())})")
    chosen = _C.isa()
    _C.set_isa(isa)
    # at::empty of the extension is out of conftest's reach; this is torch's own way to fill it.
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        _C.set_isa(chosen)


@pytest.fixture(params=ISAS)
def isa(request) -> Iterator[str]:
    with run_isa(request.param):
        yield request.param
