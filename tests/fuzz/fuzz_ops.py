"""Ops against float64: every backend and instruction set of this machine, forward and backward, with odd operands."""

from __future__ import annotations

import torch
from draw import Draw
from fuzz_driver import Fuzzer
from isas import CPU_BACKENDS, backend_with_isa
from op_case import draw_case, isolation, products_mix_rows
from op_cases import OPS

from fastbert.errors import BackendError
from fastbert.native.availability import extension_error, triton_error


def backends() -> list[str]:
    """As tests/support/isas.py names them. The interpreter is slow, so Triton's is one name of many."""
    here = ["torch"]
    if extension_error() is None:
        from fastbert import _C

        here += [name for name in CPU_BACKENDS if name.partition("-")[2] in _C.isas()]
    return here + (["triton"] if triton_error() is None else [])


def run_case(draw: Draw) -> None:
    name, backend = draw.choice(OPS), draw.choice(backends())
    kind, deterministic = backend.partition("-")[0], draw.flag()
    dtypes = [torch.float32, torch.bfloat16, *([torch.float16] if kind != "cpu" else [])]
    dtype = draw.choice(dtypes)
    draw.doing = f"{name} on {backend}, {dtype}"
    draw.note(draw.doing)
    case, out_groups, in_groups = OPS[name].make(draw, kind, dtype)
    draw_case(draw, case)
    with backend_with_isa(backend):
        torch.use_deterministic_algorithms(kind == "cpu" or deterministic)  # which fills new memory with NaN
        seed = draw.seed()
        try:
            case.reads_gaps = kind != "cpu" and dtype is torch.bfloat16 and products_mix_rows()
            case.compare(seed)
            if in_groups is not None and in_groups.numel() and not case.reads_gaps:
                isolation(draw, case, seed, out_groups, in_groups)
        except BackendError as error:
            draw.note(f"not served: {error}")
        finally:
            torch.use_deterministic_algorithms(False)


FUZZER = Fuzzer("ops", run_case, cases=50)
