"""Runs the kernels of csrc/cuda without a GPU: built with cuda_emulation.h, each call in a process of its own.

A process a call: AddressSanitizer then needs no preloading, and what it finds is a failed test, not a dead pytest.
"""

from __future__ import annotations

import functools
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from built import ROOT, built

from fastbert.native import recipe
from fastbert.native.availability import cuda_error

HERE = Path(__file__).parent
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # fastbert::DType
ACTIVATIONS = {"gelu": 1, "gelu_tanh": 2, "relu": 3, "tanh": 4, "silu": 5}  # fastbert::Activation
# They compile in 9 seconds and not in 16; what they compute takes a few milliseconds either way.
EMULATED = ["-O0", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
EMULATED += [f'-DFASTBERT_CUDA_EMULATION="{HERE}/cuda_emulation.h"']
FLAGS = ["-std=c++17", *EMULATED]
FLAGS += ["-fsanitize=address,alignment,bounds,shift,signed-integer-overflow", "-fno-sanitize-recover=all"]


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        pytest.skip("no C++ compiler to build the emulated kernels with")
    return found


def compile_once(name: str, sources: list[Path], flags: Sequence[str] = FLAGS, links: Sequence[str] = ()) -> Path:
    """A program of `sources`, built once."""
    parts = [*sources, *sorted(ROOT.glob("csrc/cuda/*")), *sorted(ROOT.glob("csrc/include/*.h"))]
    parts += [*sorted(ROOT.glob("csrc/ops/*.h")), *sorted(ROOT.glob("csrc/ops/cuda/*"))]
    parts += [p for p in sorted(HERE.glob("cuda_*/**/*")) + sorted(HERE.glob("cuda_*")) if p.is_file()]

    def make(program: Path) -> None:
        objects = []
        for source in sources:
            objects.append(program.parent / f"{name}-{source.parent.name}-{source.stem}-{source.suffix[1:]}.o")
            build([*flags, "-c", "-x", "c++", str(source), "-o", str(objects[-1])])
        build([*flags, *map(str, objects), *links, "-o", str(program)])

    return built("cuda-emulation", name, (compiler(), flags, links, torch.__version__), parts, make)


def build(arguments: list[str]) -> None:
    done = subprocess.run([compiler(), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@functools.cache
def runner() -> Path:
    return compile_once("kernels", [HERE / "cuda_runner.cpp", *sorted(ROOT.glob("csrc/cuda/*.cu"))])


@functools.cache
def operators() -> Path:
    """A library of csrc/ops/cuda over the emulated kernels, whose "GPU" is memory of the CPU."""
    from torch.utils.cpp_extension import include_paths, library_paths

    sources = [HERE / "cuda_operators.cpp", *sorted(ROOT.glob("csrc/cuda/*.cu"))]
    sources += [*sorted(ROOT.glob("csrc/ops/cuda/*.cpp")), ROOT / "csrc" / "ops" / "array.cpp"]
    flags = ["-std=c++17", *EMULATED, "-fPIC", "-fvisibility=hidden", "-DUSE_CUDA", *recipe.TARGET_FLAGS]
    flags += [word for path in include_paths() for word in ("-isystem", path)]
    # What this library has of libtorch's functions goes before libtorch's own.
    links = ["-shared", "-Wl,-Bsymbolic", *(f"-L{path}" for path in library_paths()), "-ltorch_cpu"]
    return compile_once("operators", sources, flags, links)


@contextmanager
def operators_on_the_cpu(*names: str) -> Iterator[None]:
    """fastbert::{name} of the CUDA backend takes CPU tensors, by what the library registers for CUDA."""
    if cuda_error() is None:
        pytest.skip("the extension has the CUDA operators, which these would replace: `make gpu` runs them")
    torch.ops.load_library(str(operators()))
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    library = torch.library.Library("fastbert", "IMPL")
    for name in names:
        library.impl(name, functools.partial(getattr(torch.ops.fastbert, name).default.redispatch, keys), "CPU")
    try:
        yield
    finally:
        library._destroy()


@dataclass
class Out:
    """A buffer that the kernel writes; `shape` (or a tensor that it changes in place) says what stands there before."""

    tensor: torch.Tensor

    @classmethod
    def empty(cls, *shape: int, dtype: torch.dtype) -> Out:
        """Every byte 255, which is NaN in each dtype: what a kernel forgets to write is then seen."""
        return cls(
            torch.full((torch.zeros(shape).numel() * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype).view(shape)
        )


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def run(kernel: str, *operands, order: str = "up", offset: int = 0) -> list[torch.Tensor]:
    """The kernel's outputs, in the order of its `Out` operands. `order`: of threads and blocks, "up" or "down".

    `offset`: elements by which each floating-point buffer begins after an address that loads of 16 bytes take.
    """
    packed, outputs = [], []
    for value in operands:
        if value is None:
            packed.append(b"n")
        elif isinstance(value, int):
            packed.append(struct.pack("=cq", b"i", value))
        elif isinstance(value, float):
            packed.append(struct.pack("=cd", b"d", value))
        else:
            tensor = value.tensor if isinstance(value, Out) else value
            if isinstance(value, Out):
                outputs.append(tensor)
            data, kind = _bytes(tensor), b"w" if isinstance(value, Out) else b"r"
            start = offset * tensor.element_size() if tensor.is_floating_point() else 0
            packed.append(struct.pack("=cqq", kind, len(data), start) + data)
    command, environment = [str(runner()), kernel, order], {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(command, input=b"".join(packed), capture_output=True, timeout=300, env=environment)
    assert done.returncode == 0, f"{kernel}: {done.stderr.decode()[:4000]}"
    results, start = [], 0
    for tensor in outputs:
        size = tensor.numel() * tensor.element_size()
        raw = torch.frombuffer(bytearray(done.stdout[start : start + size]), dtype=torch.uint8) if size else tensor
        results.append(raw.view(tensor.dtype).view(tensor.shape))
        start += size
    assert start == len(done.stdout)
    return results


def add_layer_norm_fwd(
    x,
    x_bias,
    residual,
    weight,
    bias,
    philox,
    dropout_p,
    eps=1e-12,
    return_sum=True,
    return_stats=True,
    rms=False,
    **options,
):
    """As the op of that name: out, summed, mean, rstd; None for what is not asked for, and for RMSNorm's mean."""
    rows, hidden_size = x.shape
    out = Out.empty(rows, hidden_size, dtype=x.dtype)
    summed = Out.empty(rows, hidden_size, dtype=x.dtype) if return_sum else None
    mean, rstd = (
        Out.empty(rows, dtype=torch.float32) if asked else None for asked in (return_stats and not rms, return_stats)
    )
    results = run(
        "add_layer_norm_fwd",
        DTYPES[x.dtype],
        rms,
        x,
        x_bias,
        residual,
        weight,
        bias,
        float(dropout_p),
        philox,
        eps,
        rows,
        hidden_size,
        out,
        summed,
        mean,
        rstd,
        **options,
    )
    found = iter(results)
    return [next(found) if operand is not None else None for operand in (out, summed, mean, rstd)]


def add_layer_norm_bwd(dout, dsum, summed, mean, rstd, weight, philox, dropout_p, has_x_bias, **options):
    """As the op of that name: dx (dsummed without dropout), dsummed, dx_bias, dweight, dbias; RMSNorm has no mean."""
    (rows, hidden_size), dtype = dout.shape, dout.dtype
    dx = Out.empty(rows, hidden_size, dtype=dtype) if dropout_p > 0 else None
    dsummed = Out.empty(rows, hidden_size, dtype=dtype)
    dx_bias = Out.empty(hidden_size, dtype=dtype) if has_x_bias else None
    dweight, dbias = (Out.empty(hidden_size, dtype=dtype) if asked else None for asked in (True, mean is not None))
    results = run(
        "add_layer_norm_bwd",
        DTYPES[dtype],
        dout,
        dsum,
        summed,
        mean,
        rstd,
        weight,
        float(dropout_p),
        philox,
        rows,
        hidden_size,
        dx,
        dsummed,
        dx_bias,
        dweight,
        dbias,
        **options,
    )
    found = iter(results)
    dx, dsummed, dx_bias, dweight, dbias = (
        next(found) if operand is not None else None for operand in (dx, dsummed, dx_bias, dweight, dbias)
    )
    return [dsummed if dx is None else dx, dsummed, dx_bias, dweight, dbias]


def embed_fwd(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, eps, **options):
    rows, width = word.shape[0] if input_ids is None else input_ids.numel(), word.shape[1]
    sizes = (word.shape[0], *(1 if table is None else table.shape[0] for table in (position, token_type)))
    (out,) = run(
        "embed_fwd",
        DTYPES[word.dtype],
        word,
        position,
        token_type,
        input_ids,
        position_ids,
        token_type_ids,
        *sizes,
        weight,
        bias,
        eps,
        rows,
        width,
        Out.empty(rows, width, dtype=word.dtype),
        **options,
    )
    return out


def activation_fwd(pre, activation, gated=False, in_place=False, **options):
    """inner; `in_place` (not where gated): in pre's memory."""
    rows, columns = pre.shape[0], pre.shape[1] // (2 if gated else 1)
    inner = None if in_place else Out.empty(rows, columns, dtype=pre.dtype)
    operands = (int(gated), Out(pre) if in_place else pre, rows, columns, inner)
    (found,) = run("activation_fwd", DTYPES[pre.dtype], ACTIVATIONS[activation], *operands, **options)
    return found


def activation_bwd(dinner, pre, activation, gated=False, needs_dbias=True, in_place=True, **options):
    """dpre, inner, dbias (absent unless needed); `in_place`: one of the first two in dinner's memory."""
    (rows, columns), dtype = dinner.shape, pre.dtype
    dpre = None if in_place and not gated else Out.empty(*pre.shape, dtype=dtype)
    inner = None if in_place and gated else Out.empty(rows, columns, dtype=dtype)
    dbias = Out.empty(pre.shape[1], dtype=dtype) if needs_dbias else None
    operands = (int(gated), Out(dinner) if in_place else dinner, pre, rows, columns, dpre, inner, dbias)
    found = run("activation_bwd", DTYPES[dtype], ACTIVATIONS[activation], *operands, **options)
    return [found[1], found[0], *found[2:]] if in_place and gated else found
