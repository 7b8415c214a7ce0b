"""How the C++ extension `fastbert._C` is compiled: its sources, its flags, and whether with its CUDA part.

setup.py and build_backend.py load this file by its path, before there is a package, and `fastbert build` runs it as a
program. So it imports nothing of fastbert, and torch and setuptools inside functions only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Any

OLDEST_TORCH = (2, 11)  # whose stable ABI the extension is compiled for: the file runs with every newer torch
PACKAGE = Path(__file__).resolve().parents[1]
STAMP = "_C.json"  # beside the extension: what it was built from and against

# -O3 and no errno from sqrt: the kernels' loops vectorise. Of OpenMP only its `simd`: the threads are torch's. There is
# no -march: wider instruction sets are chosen by cpuid at run time. torch itself adds the -std that it needs. What is
# not warned of are the undefined values in gcc's own AVX-512 headers. The target is OLDEST_TORCH, as torch counts it.
COMPILE_FLAGS = ["-O3", "-fno-math-errno", "-fopenmp-simd", "-fvisibility=hidden", "-Wall", "-g0"]
COMPILE_FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
TARGET_FLAGS = [f"-DTORCH_TARGET_VERSION=0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000ull"]
COMPILE_FLAGS += TARGET_FLAGS

# PTX of the last is what newer GPUs compile for themselves.
ARCHITECTURES = ("80", "90a", "100")
NVCC_FLAGS = ["-O3", *(f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES)]
NVCC_FLAGS += [f"-gencode=arch=compute_{ARCHITECTURES[-1]},code=compute_{ARCHITECTURES[-1]}"]
NVCC_FLAGS += [f"--threads={len(ARCHITECTURES) + 1}"]  # side by side: the slowest file is 3 times 7 seconds
OLDEST_NVCC = (12, 8)  # the first that knows the last of them


# --------------------------------------------------------------------------------------------------------------------
# What there is


def home() -> Path:
    """The folder that holds csrc/: the package as it is installed, the root of a checkout."""
    return PACKAGE if (PACKAGE / "csrc").is_dir() else PACKAGE.parent


def sources() -> list[Path]:
    """Every file that is compiled or included, sorted, so that builds repeat."""
    return sorted(p for p in home().glob("csrc/**/*") if p.suffix in (".cpp", ".cu", ".h"))


def source_hash() -> str:
    """Of the sources and of this file, which has the flags."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sources():
        digest.update(path.relative_to(home()).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def version_pair(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def site_folders() -> list[str]:
    """Where the Python that installs has its packages; pip's isolated builds take them from sys.path."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [*site.getsitepackages(), *user]


def torch_is_there() -> bool:
    """Whether a torch that is new enough can be found, in an isolated build in the environment that installs, too.

    The extension is compiled for the stable ABI, so that it does not matter which torch lends its headers; what is
    there need not be downloaded. Its folder comes last: a build's own packages go first.
    """
    import importlib.metadata  # not at the top: this file is imported with every model

    folders = [*sys.path, *site_folders()]
    for distribution in importlib.metadata.distributions(name="torch", path=folders):
        if version_pair(distribution.version) < OLDEST_TORCH:
            return False  # the first is the one that would be imported
        sys.path += [folder for folder in site_folders() if folder not in sys.path]
        return True
    return False


def compiler() -> list[str] | None:
    """The command of the C++ compiler that torch calls, or None."""
    words = shlex.split(os.environ.get("CXX", "c++"))
    return words if words and shutil.which(words[0]) else None


def compiler_version() -> str:
    said = subprocess.run([*(compiler() or ()), "--version"], capture_output=True, text=True).stdout
    return said.splitlines()[0] if said else "unknown"


def unsupported() -> str | None:
    """Why no extension can be built here, or None."""
    if not sources():
        return f"there is no csrc in {home()}"
    if os.name == "nt":
        return "the C++ kernels build with gcc and clang only"
    if compiler() is None:
        return f"there is no C++ compiler ({os.environ.get('CXX', 'c++')}; CXX names another)"
    if not torch_is_there():
        return f"torch {dotted(OLDEST_TORCH)} or newer is not there, and its headers are needed"
    return None


# --------------------------------------------------------------------------------------------------------------------
# CUDA


def nvcc_home() -> str | None:
    """Where nvcc says its toolkit is: one on PATH may be a script, beside which torch looks for headers in vain."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--dryrun", "none.cu"], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    return top and os.path.realpath(top[1])


def cpp_extension() -> Any:
    """torch's module of this name, told where the CUDA toolkit is: it looks for it when it is imported."""
    if not {"CUDA_HOME", "CUDA_PATH"} & {*os.environ} and (toolkit := nvcc_home()):
        os.environ["CUDA_HOME"] = toolkit
    from torch.utils import cpp_extension

    return cpp_extension


def cuda_unsupported() -> str | None:
    """Why the CUDA part cannot be built here, or None."""
    toolkit = cpp_extension().CUDA_HOME
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    nvcc = Path(toolkit or "", "bin", "nvcc")
    if not nvcc.is_file():
        return "there is no nvcc; CUDA_HOME says where it is"
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", said)
    if release is None:
        return f"{nvcc} does not tell its version"
    version = (int(release[1]), int(release[2]))
    if version < OLDEST_NVCC:
        return f"nvcc is {dotted(version)}, the kernels need {dotted(OLDEST_NVCC)}"
    if release[1] != torch.version.cuda.split(".")[0]:
        return f"nvcc is {dotted(version)}, torch is built with CUDA {torch.version.cuda}"
    return None


def cuda_choice() -> tuple[bool, str]:
    """Whether the CUDA part is built, and what is said of it. Raises SystemExit when what is asked for cannot be."""
    asked = os.environ.get("FASTBERT_BUILD_CUDA", "auto")
    if asked not in ("auto", "0", "1"):
        raise SystemExit(f"FASTBERT_BUILD_CUDA={asked!r}: valid values are auto, 0 and 1")
    against = "FASTBERT_BUILD_CUDA=0" if asked == "0" else cuda_unsupported()
    if against is None:
        return True, "with the CUDA part"
    if asked == "1":
        raise SystemExit(f"FASTBERT_BUILD_CUDA=1: {against}")
    return False, f"no CUDA part ({against})"


# --------------------------------------------------------------------------------------------------------------------
# Building


def say(line: str) -> None:
    print(f"fastbert: {line}", flush=True)


def extension(with_cuda: bool, without_isas: Iterable[str] = ()) -> Any:
    torch_builds = cpp_extension()
    # Relative paths, as setuptools wants them: a build runs in `home()`.
    paths = [p.relative_to(home()) for p in sources() if p.suffix != ".h" and (with_cuda or "cuda" not in p.parts)]
    flags: Any = [*COMPILE_FLAGS, *(f"-DFASTBERT_WITHOUT_{isa.upper()}" for isa in without_isas)]
    if with_cuda:
        flags = {"cxx": [*flags, "-DFASTBERT_WITH_CUDA", "-DUSE_CUDA"], "nvcc": NVCC_FLAGS}
    extension_type = torch_builds.CUDAExtension if with_cuda else torch_builds.CppExtension
    extension_module = extension_type("fastbert._C", [str(p) for p in paths], extra_compile_args=flags)
    extension_module.optional = True  # editable installs then do not look for a library that was not built
    return extension_module


# isa.h's own answer, by cpuid and what the system lets a process do: /proc/cpuinfo's words depend on the kernel's age.
LACKING = """
#include <cstdio>
#include "include/isa.h"
int main() {
  for (unsigned i = 0; i < fastbert::kIsaNames.size(); ++i) {
    if (!fastbert::can_run(static_cast<fastbert::Isa>(i))) std::puts(fastbert::kIsaNames[i]);
  }
}
"""


def lacking_isas() -> list[str]:
    """The instruction sets that this machine cannot run; none where a program that asks cannot be compiled or run."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "lacking")
        command = [*(compiler() or ()), "-std=c++17", "-x", "c++", f"-I{home() / 'csrc'}", "-", "-o", str(program)]
        try:
            subprocess.run(command, input=LACKING, text=True, check=True, capture_output=True)
            return subprocess.run([program], text=True, check=True, capture_output=True).stdout.split()
        except (subprocess.CalledProcessError, OSError):
            return []


def build_command() -> type:
    """setuptools' `build_ext` of the extension, which leaves no library where it does not compile, and says why."""
    from setuptools.errors import BaseError
    from torch import __version__ as torch_version
    from torch.version import cuda

    class BuildOrFallBack(cpp_extension().BuildExtension):  # type: ignore[misc]
        def run(self) -> None:
            self.stamp: dict[str, Any] | None = None
            # What an editable install makes stays here; wheels, and what `fastbert build` keeps, go to other machines.
            self.without_isas = lacking_isas() if self.editable_mode else []
            library = Path(self.get_ext_fullpath("fastbert._C"))
            for old in (library, library.with_name(STAMP)):  # an older one must not pass for this
                old.unlink(missing_ok=True)
            super().run()
            if self.stamp is not None:
                library.with_name(STAMP).write_text(json.dumps(self.stamp))

        def failure(self, with_cuda: bool) -> str | None:
            # A later extension must not be added to what an earlier one was told.
            vars(self.extensions[0]).update(vars(extension(with_cuda, self.without_isas)))
            library = Path(self.get_ext_fullpath("fastbert._C"))
            library.unlink(missing_ok=True)  # not the one of `run` where that builds in place
            try:
                super().build_extensions()
            # RuntimeError is how torch reports a failed ninja; the last two come from a compiler that is not there.
            except (BaseError, RuntimeError, subprocess.CalledProcessError, OSError) as error:
                return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            return None if library.is_file() else "the linker failed"  # which setuptools only warns of

        def build_extensions(self) -> None:
            with_cuda, about_cuda = cuda_choice()
            failure = self.failure(with_cuda)
            if failure is not None and with_cuda:
                if os.environ.get("FASTBERT_BUILD_CUDA") == "1":
                    raise SystemExit(f"FASTBERT_BUILD_CUDA=1: the extension did not compile ({failure})")
                about_cuda = f"no CUDA part (with it the extension did not compile: {failure})"
                with_cuda, failure = False, self.failure(with_cuda=False)
            if failure is not None:
                say(f"pure Python, because the C++ extension did not compile ({failure}); {about_cuda}")
                return
            cpu = f"this CPU (not {', '.join(self.without_isas)})" if self.without_isas else "the CPU"
            say(f"with the C++ kernels for {cpu}, built against torch {torch_version}; {about_cuda}")
            self.stamp = {
                "sources": source_hash(),
                "target": dotted(OLDEST_TORCH),
                "torch": torch_version,
                "cuda": cuda if with_cuda else None,
                "compiler": compiler_version(),
            }

    return BuildOrFallBack


def main(folder: str) -> int:
    """Build into `folder`, and load it. The last line with "fastbert: " in front tells what came of it; 1: nothing."""
    if (against := unsupported()) is not None:
        say(against)
        return 1
    from setuptools import Distribution

    os.chdir(home())
    command = build_command()(Distribution({"name": "fastbert", "ext_modules": [extension(with_cuda=False)]}))
    command.build_lib, command.build_temp = folder, str(Path(folder, "temp"))
    command.ensure_finalized()
    command.run()
    if command.stamp is None:
        return 1
    library = command.get_ext_fullpath("fastbert._C")
    try:
        loader = ExtensionFileLoader("fastbert._C", library)
        loader.create_module(ModuleSpec("fastbert._C", loader, origin=library))
    except ImportError as error:
        say(f"it was built, but does not load ({error})")
        return 1
    return 0


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules are fastbert's alone
    sys.exit(main(sys.argv[1]))
