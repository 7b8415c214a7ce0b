"""Every kernel of csrc/cuda, compiled by nvcc for GPUs that need not be here, and what the machine code then tells.

What is checked are the facts that `make facts` has written down (tests/support/facts.py).
"""

from __future__ import annotations

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from built import ROOT, built
from cubins import ARCHITECTURES, output_of
from facts import kept

from fastbert.native import recipe

# Matrices and vectors in the dtype that a thread reads, each in loads of 16 bytes where rows allow them.
WIDE_LOADS = {
    "add_layer_norm_fwd_kernel": 5,
    "add_layer_norm_bwd_kernel": 4,
    "embed_fwd_kernel": 5,
    "activation_fwd_kernel": 4,
    "activation_bwd_kernel": 4,
}
ALL_KERNELS = {*WIDE_LOADS, "column_sums_kernel"}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def kernels(request) -> dict[str, dict]:
    """By mangled name: stack, local and shared bytes, registers, loads by kind, for one architecture."""
    return kept("cuda")[request.param]


def kind_of(name: str) -> str:
    (kind,) = (kernel for kernel in ALL_KERNELS if re.search(rf"\d{kernel}", name))
    return kind


def is_wide(name: str) -> bool:
    """By the kernel's bool template argument, which column_sums_kernel does not have."""
    return "Lb1E" in name


def test_every_kernel_is_there_in_every_dtype(kernels):
    assert {kind_of(name) for name in kernels} == ALL_KERNELS
    for kind in ALL_KERNELS:
        dtypes = {re.search(r"_kernelI(?:NS_3RowI)?(f|6__half|13__nv_bfloat16)", n)[1] for n in kernels if kind in n}
        assert dtypes == {"f", "6__half", "13__nv_bfloat16"}, kind


def test_registers_suffice_and_shared_memory_is_dynamic(kernels):
    for name, facts in kernels.items():
        assert facts["stack"] == facts["local"] == 0, f"{name} spills registers: {facts}"
        assert facts["local_accesses"] == 0, f"{name} uses local memory"
        # Up to 48 KiB are a block's without asking; what is dynamic is checked by the emulation in test_cuda.py.
        assert facts["shared"] <= 1024, f"{name}: {facts['shared']} bytes of static shared memory"


def test_loads_are_16_bytes_wide(kernels):
    for name, facts in kernels.items():
        if is_wide(name):
            loads = facts["loads"]  # how many there are of each kind
            wide = sum(count for load, count in loads.items() if load.startswith("LDG.E.128"))
            assert wide >= WIDE_LOADS[kind_of(name)], f"{name}: {loads}"
            assert not [load for load in loads if ".U16" in load or ".U8" in load], f"{name}: {loads}"


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


def test_setup_builds_for_the_same_architectures():
    assert tuple(architecture.removeprefix("sm_") for architecture in ARCHITECTURES) == recipe.ARCHITECTURES
