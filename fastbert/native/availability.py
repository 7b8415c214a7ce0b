"""Whether the C++ extension, its CUDA part and Triton are there. Asked once a process, and never at import."""

from __future__ import annotations

import os
import warnings
from types import ModuleType

from fastbert.native.cores import warn_of_quota

_extension_error: str | None = "not asked yet"


def extension_error() -> str | None:
    """None when the C++ extension is loaded, else why it is not. ValueError: FASTBERT_ISA is none that runs here."""
    global _extension_error
    if _extension_error == "not asked yet":
        from fastbert.native import cache  # here: `import fastbert` is to be cheap

        try:
            cache.load()  # which registers its kernels
        except ModuleNotFoundError as error:
            _extension_error = f"the C++ extension is not built ({error})"
        except ImportError as error:  # mostly a symbol that another torch had
            _extension_error = f"the C++ extension does not load, build it for this torch ({error})"
        else:
            from fastbert import _C

            if (isa := os.environ.get("FASTBERT_ISA")) is not None:
                _cap_isa(_C, isa)
            elif (left_out := isa_left_out()) is not None:
                warnings.warn(f"fastbert's C++ kernels run as {_C.isa()}, not at their best: {left_out}", stacklevel=2)
            _extension_error = None
            warn_of_quota()
    return _extension_error


def _cap_isa(extension: ModuleType, isa: str) -> None:
    try:
        extension.set_isa(isa)
    except ValueError as error:
        raise ValueError(f"FASTBERT_ISA: {error}") from None


def isa_left_out() -> str | None:
    """None when the extension, which is loaded, has kernels for the best instruction set of this machine."""
    from fastbert import _C

    best = _C.machine_isas()[-1]
    if best in _C.isas():
        return None
    return f"built for another CPU, without {best}: `fastbert build` makes one for all"


_triton_error: str | None = "not asked yet"


def triton_error() -> str | None:
    """None when Triton can be imported, else why not."""
    global _triton_error
    if _triton_error == "not asked yet":
        try:
            import triton  # noqa: F401

            _triton_error = None
        except ImportError as error:
            _triton_error = f"Triton is not installed ({error})"
    return _triton_error


def cuda_error() -> str | None:
    """None when the C++ extension is loaded with its CUDA part, else why not."""
    if extension_error() is not None:
        return extension_error()
    from fastbert._C import has_cuda

    return None if has_cuda else "the C++ extension was built without its CUDA part"


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo (0.7 s): a trace calls these
# functions instead of tracing their imports, also when it is the process's first call.
for _asked_once in (extension_error, triton_error, cuda_error):
    _asked_once._dynamo_marked_constant = True  # type: ignore[attr-defined]
