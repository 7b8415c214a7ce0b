"""The CPU backend once for each instruction set that it has code for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fastbert.native.availability import extension_error, triton_error
from fastbert.ops import are_weights_packed


def _amx() -> tuple[str, ...]:
    """AMX where there is one, or an emulated one, as in the build of `make sanitize`."""
    if extension_error() is not None:
        return ()
    from fastbert import _C

    return ("cpu-amx",) if "amx" in _C.isas() else ()


# Of floats there is no code for AVX-VNNI and VNNI, which multiply int8; and what has no products has none for AMX.
WITHOUT_PRODUCTS = ("cpu-generic", "cpu-avx2", "cpu-avx512", "cpu-avx512_bf16")
OF_FLOATS = (*WITHOUT_PRODUCTS, *_amx())
# Those with products of ours, for which weights are packed: without, they are torch's, which read the weight itself.
PACKED = tuple(backend for backend in OF_FLOATS if backend != "cpu-generic")
CPU_BACKENDS = (*WITHOUT_PRODUCTS[:2], "cpu-avx_vnni", "cpu-avx512", "cpu-avx512_vnni", "cpu-avx512_bf16", *_amx())


packs = pytest.mark.skipif(not are_weights_packed(), reason="products are torch's own here, and no weights are packed")


def device_of(backend: str) -> str:
    """Triton's tensors are on a GPU where there is one, else on the CPU for its interpreter."""
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


@contextmanager
def filled_memory() -> Iterator[None]:
    """NaN in what the extension allocates; conftest.py does it for Python."""
    from fastbert import _C

    _C.fill_memory(True)
    try:
        yield
    finally:
        _C.fill_memory(False)


@contextmanager
def backend_with_isa(param: str) -> Iterator[str]:
    """The backend's name, "cpu" for "cpu-avx2", while its ISA is set; a visible skip where this machine lacks it."""
    name, _, isa = param.partition("-")
    if name == "triton" and triton_error() is not None:
        pytest.skip(triton_error())
    if not isa:
        yield name
        return
    if extension_error() is not None:
        pytest.skip(extension_error())
    from fastbert import _C

    if isa not in _C.machine_isas():
        pytest.skip(f"this CPU cannot run {isa} (it can run {', '.join(_C.machine_isas())})")
    assert isa in _C.isas(), f"this checkout was built for another CPU, without {isa}: pip install -e . builds it again"
    chosen = _C.isa()
    _C.set_isa(isa)
    try:
        with filled_memory():
            yield name
    finally:
        _C.set_isa(chosen)
