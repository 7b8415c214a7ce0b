"""Builds the C++ extension `fastbert._C`; everything else about the package stands in pyproject.toml.

Without torch, without a compiler, or when compiling fails, the package still installs, in pure Python. One line says
what was chosen and why. There is no network access, no submodule and no query of a device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    torch, torch_error = None, error

# -O3 and no errno from sqrt: the kernels' loops vectorise. -fopenmp is what makes at::parallel_for parallel. There is
# no -march: wider instruction sets are chosen by cpuid at run time. torch itself adds the -std that it needs. What is
# not warned of are the undefined values in gcc's own AVX-512 headers.
LINUX = sys.platform.startswith("linux")
COMPILE_FLAGS = ["-O3", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-g0"]
COMPILE_FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
OPENMP_FLAG = "-fopenmp" if LINUX else "-fopenmp-simd"


def cuda_choice() -> str:
    """What is said of the CUDA part. Raises when FASTBERT_BUILD_CUDA asks for what cannot be built."""
    asked = os.environ.get("FASTBERT_BUILD_CUDA", "auto")
    if asked not in ("auto", "0", "1"):
        raise SystemExit(f"FASTBERT_BUILD_CUDA={asked!r}: valid values are auto, 0 and 1")
    if asked == "1":
        raise SystemExit("FASTBERT_BUILD_CUDA=1: this version of fastbert has no CUDA sources; GPUs run Triton kernels")
    return "no CUDA part (FASTBERT_BUILD_CUDA=0)" if asked == "0" else "no CUDA part (it has no sources yet)"


def say(choice: str) -> None:
    print(f"fastbert: {choice}; {CUDA_CHOICE}", flush=True)


CUDA_CHOICE = cuda_choice()

if torch is None:

    class BuildPurePython(build_py):
        def run(self):
            super().run()
            say(f"pure Python, because torch cannot be imported where this is built ({torch_error}); to build the"
                " C++ kernels install torch first and pass --no-build-isolation")  # fmt: skip

    ext_modules, cmdclass = [], {"build_py": BuildPurePython}
else:

    class BuildOrFallBack(BuildExtension):
        def build_extensions(self):
            try:
                super().build_extensions()
            # RuntimeError is how torch reports a failed ninja; the last two come from a compiler that is not there.
            except (BaseError, RuntimeError, subprocess.CalledProcessError, OSError) as error:
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                say(f"pure Python, because the C++ extension did not compile ({reason})")
            else:
                say(f"with the C++ kernels for the CPU, built against torch {torch.__version__}")

    # Relative paths, as setuptools wants them in the sdist's list; sorted, so that builds repeat.
    root = Path(__file__).parent
    sources = sorted(str(p.relative_to(root)) for p in root.glob("csrc/**/*.cpp"))
    extension = CppExtension(
        "fastbert._C",
        sources,
        extra_compile_args=[*COMPILE_FLAGS, OPENMP_FLAG],
        extra_link_args=[OPENMP_FLAG] if LINUX else [],
    )
    extension.optional = True  # editable installs then do not look for a library that was not built
    ext_modules, cmdclass = [extension], {"build_ext": BuildOrFallBack}

setup(ext_modules=ext_modules, cmdclass=cmdclass)
