"""Builds the C++ extension `fastbert._C`; everything else about the package stands in pyproject.toml.

Without torch, without a compiler, or when compiling fails, the package still installs, in pure Python. One line says
what was chosen and why. There is no network access, no submodule and no query of a device.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError


def nvcc_home() -> str | None:
    """Where nvcc says its toolkit is: one on PATH may be a script, beside which torch looks for headers in vain."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--dryrun", "none.cu"], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    return top and os.path.realpath(top[1])


if not {"CUDA_HOME", "CUDA_PATH"} & {*os.environ} and (home := nvcc_home()):
    os.environ["CUDA_HOME"] = home
try:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
except ImportError as error:
    torch, torch_error = None, error

# -O3 and no errno from sqrt: the kernels' loops vectorise. -fopenmp is what makes at::parallel_for parallel. There is
# no -march: wider instruction sets are chosen by cpuid at run time. torch itself adds the -std that it needs. What is
# not warned of are the undefined values in gcc's own AVX-512 headers.
LINUX = sys.platform.startswith("linux")
COMPILE_FLAGS = ["-O3", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-g0"]
COMPILE_FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
OPENMP_FLAG = "-fopenmp" if LINUX else "-fopenmp-simd"


# PTX of the last is what newer GPUs compile for themselves.
ARCHITECTURES = ("80", "90a", "100")
NVCC_FLAGS = ["-O3", *(f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES)]
NVCC_FLAGS += [f"-gencode=arch=compute_{ARCHITECTURES[-1]},code=compute_{ARCHITECTURES[-1]}"]
NVCC_FLAGS += [f"--threads={len(ARCHITECTURES) + 1}"]  # side by side: the slowest file is 3 times 7 seconds
OLDEST_NVCC = (12, 8)  # the first that knows the last of them


def cuda_objection() -> str | None:
    """Why the CUDA part cannot be built here, or None."""
    if torch is None or torch.version.cuda is None:
        return "torch cannot be imported" if torch is None else f"torch {torch.__version__} is built without CUDA"
    nvcc = Path(CUDA_HOME or "", "bin", "nvcc")
    if not nvcc.is_file():
        return "there is no nvcc; CUDA_HOME says where it is"
    release = re.search(
        r"release (\d+)\.(\d+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    )
    if release is None:
        return f"{nvcc} does not tell its version"
    version = (int(release[1]), int(release[2]))
    if version < OLDEST_NVCC:
        return f"nvcc is {release[1]}.{release[2]}, the kernels need {OLDEST_NVCC[0]}.{OLDEST_NVCC[1]}"
    if release[1] != torch.version.cuda.split(".")[0]:
        return f"nvcc is {release[1]}.{release[2]}, torch is built with CUDA {torch.version.cuda}"
    return None


def cuda_choice() -> tuple[bool, str]:
    """Whether the CUDA part is built, and what is said of it. Raises when what is asked for cannot be."""
    asked = os.environ.get("FASTBERT_BUILD_CUDA", "auto")
    if asked not in ("auto", "0", "1"):
        raise SystemExit(f"FASTBERT_BUILD_CUDA={asked!r}: valid values are auto, 0 and 1")
    objection = "FASTBERT_BUILD_CUDA=0" if asked == "0" else cuda_objection()
    if objection is None:
        return True, "with the CUDA part"
    if asked == "1":
        raise SystemExit(f"FASTBERT_BUILD_CUDA=1: {objection}")
    return False, f"no CUDA part ({objection})"


WITH_CUDA, CUDA_CHOICE = cuda_choice()


def say(choice: str, cuda: str = CUDA_CHOICE) -> None:
    print(f"fastbert: {choice}; {cuda}", flush=True)


if torch is None:

    class BuildPurePython(build_py):
        def run(self):
            super().run()
            say(f"pure Python, because torch cannot be imported where this is built ({torch_error}); to build the"
                " C++ kernels install torch first and pass --no-build-isolation")  # fmt: skip

    ext_modules, cmdclass = [], {"build_py": BuildPurePython}
else:

    def extension(with_cuda: bool) -> Extension:
        # Relative paths, as setuptools wants them in the sdist's list; sorted, so that builds repeat.
        root = Path(__file__).parent
        sources = sorted(str(p.relative_to(root)) for p in root.glob("csrc/**/*") if p.suffix in (".cpp", ".cu"))
        flags = [*COMPILE_FLAGS, OPENMP_FLAG]
        links = [OPENMP_FLAG] if LINUX else []
        if with_cuda:
            flags = {"cxx": [*flags, "-DFASTBERT_WITH_CUDA"], "nvcc": NVCC_FLAGS}
            made = CUDAExtension("fastbert._C", sources, extra_compile_args=flags, extra_link_args=links)
        else:
            sources = [s for s in sources if "cuda" not in Path(s).parts]
            made = CppExtension("fastbert._C", sources, extra_compile_args=flags, extra_link_args=links)
        made.optional = True  # editable installs then do not look for a library that was not built
        return made

    class BuildOrFallBack(BuildExtension):
        def failure(self) -> str | None:
            try:
                super().build_extensions()
            # RuntimeError is how torch reports a failed ninja; the last two come from a compiler that is not there.
            except (BaseError, RuntimeError, subprocess.CalledProcessError, OSError) as error:
                return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            return None

        def build_extensions(self):
            failure, cuda = self.failure(), CUDA_CHOICE
            if failure is not None and WITH_CUDA:
                if os.environ.get("FASTBERT_BUILD_CUDA") == "1":
                    raise SystemExit(f"FASTBERT_BUILD_CUDA=1: the extension did not compile ({failure})")
                cuda = f"no CUDA part (with it the extension did not compile: {failure})"
                vars(self.extensions[0]).update(vars(extension(with_cuda=False)))
                failure = self.failure()
            if failure is not None:
                say(f"pure Python, because the C++ extension did not compile ({failure})", cuda)
            else:
                say(f"with the C++ kernels for the CPU, built against torch {torch.__version__}", cuda)

    ext_modules, cmdclass = [extension(WITH_CUDA)], {"build_ext": BuildOrFallBack}

# The license stands here: setuptools before 77, beside which torch is often installed, cannot read its present form in
# pyproject.toml, and newer ones will reject the older form.
setup(license="Apache-2.0", ext_modules=ext_modules, cmdclass=cmdclass)
