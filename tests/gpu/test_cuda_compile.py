"""Every kernel of csrc/cuda, compiled by nvcc for GPUs that need not be here: none spills."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from built import ROOT, built

from fastbert.native import recipe

SOURCES = sorted(ROOT.glob("csrc/cuda/*.cu"))


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


def nvcc() -> str:
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc") or shutil.which("nvcc", path=f"{cuda}/bin")
    if found is None:
        pytest.skip("there is no nvcc; test_cuda.py runs the kernels in an emulation")
    return found


@pytest.mark.full
@pytest.mark.parametrize("architecture", recipe.ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_kernel_spills_and_shared_memory_is_dynamic(source, architecture):
    """What is dynamic of shared memory is checked by the emulation."""
    code = f"arch=compute_{architecture},code=sm_{architecture}"
    flags = ["-std=c++17", "-O3", "-Werror=all-warnings", "-cubin", "-Xptxas", "-v", "-gencode", code]
    command = [nvcc(), *flags, "-o", os.devnull, str(source)]
    parts = [source, *ROOT.glob("csrc/cuda/*.h"), *ROOT.glob("csrc/include/*.h")]
    name = f"{source.stem}-{architecture}"
    said = built("nvcc", name, command, sorted(parts), lambda path: path.write_text(output_of(command))).read_text()
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert frames and set(frames) == {("0", "0", "0")}, said
    assert all(int(size) <= 1024 for size in re.findall(r"(\d+) bytes smem", said)), said


def cuda_headers() -> Path:
    """The toolkit's own, or the ones that Triton brings."""
    beside = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    beside += [Path(found).resolve().parents[1] for found in (shutil.which("nvcc"),) if found]
    if (triton := find_spec("triton")) is not None and triton.origin is not None:
        beside.append(Path(triton.origin).parent / "backends" / "nvidia")
    for folder in (path / "include" for path in beside):
        if (folder / "cuda_runtime.h").is_file():
            return folder
    pytest.skip("there is no cuda_runtime.h, neither CUDA's nor Triton's")


@pytest.mark.full
@pytest.mark.parametrize("source", sorted(ROOT.glob("csrc/ops/cuda/*.cpp")), ids=lambda path: path.stem)
def test_operators_compile_against_torch_s_headers_for_cuda(source):
    """Linking them takes a torch that is built with CUDA; its headers are in every torch."""
    from torch.utils.cpp_extension import include_paths

    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    headers = [*include_paths(), str(cuda_headers())]
    system = [word for path in headers for word in ("-isystem", path)]
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-DUSE_CUDA", *recipe.TARGET_FLAGS]
    command = [compiler, "-fsyntax-only", *flags, *system, str(source)]
    parts = [
        *sorted(ROOT.glob("csrc/ops/**/*")),
        *sorted(ROOT.glob("csrc/cuda/*.h")),
        *sorted(ROOT.glob("csrc/include/*.h")),
    ]
    key = (command, torch.__version__)
    built("syntax", source.stem, key, filter(Path.is_file, parts), lambda path: path.write_text(output_of(command)))
