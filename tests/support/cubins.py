"""The kernels of csrc/cuda, compiled by nvcc for GPUs that need not be here, and what the machine code then tells."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from built import ROOT

SOURCES = sorted(ROOT.glob("csrc/cuda/*.cu"))
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")
# What nvcc calls an unnamed namespace has a hash of the file's path in it, which is another one in each checkout.
LOCAL_NAME = re.compile(r"(_GLOBAL__N__)[0-9a-f]{8}(_\d+_\w+?_cu_)[0-9a-f]{8}")


def nvcc() -> str | None:
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{cuda}/bin")


def nvcc_version() -> str | None:
    found = nvcc()
    if found is None:
        return None
    release = re.search(r"release (\S+),", output_of([found, "--version"]))
    assert release is not None
    return f"nvcc {release.group(1)}"


def cuobjdump() -> str:
    """CUDA's, or the one that Triton brings."""
    if found := shutil.which("cuobjdump"):
        return found
    import triton

    return triton.knobs.nvidia.cuobjdump.path


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def facts_of(source: Path, architecture: str) -> dict[str, dict]:
    """{mangled name of a kernel: stack, local and shared bytes, registers, loads by kind, uses of local memory}."""
    compiler, reader, facts = nvcc(), cuobjdump(), {}
    assert compiler is not None
    with TemporaryDirectory() as folder:
        cubin = f"{folder}/kernels.cubin"
        virtual = f"arch={architecture.replace('sm', 'compute')},code={architecture}"
        flags = ["-std=c++17", "-O3", "-Werror=all-warnings", "-cubin", "-gencode", virtual]
        output_of([compiler, *flags, "-o", cubin, str(source)])
        usage, sass = (output_of([reader, f"--dump-{what}", cubin]) for what in ("resource-usage", "sass"))
    usage, sass = (LOCAL_NAME.sub(r"\g<1>00000000\g<2>00000000", text) for text in (usage, sass))
    for name, text in re.findall(r"Function (\S+):\n(.*)", usage):
        facts[name] = {key.lower(): int(value) for key, value in re.findall(r"(\w+):(\d+)", text)}
    for part in re.split(r"Function : ", sass)[1:]:
        facts[part.split()[0]]["loads"] = Counter(re.findall(r"\bLDG\.\S+", part))
        facts[part.split()[0]]["local_accesses"] = len(re.findall(r"\b(?:LDL|STL)\b", part))
    return facts


def facts() -> dict[str, dict[str, dict]]:
    """Of every kernel, by architecture."""
    jobs = list(product(ARCHITECTURES, SOURCES))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda job: facts_of(job[1], job[0]), jobs))
    result: dict[str, dict[str, dict]] = {architecture: {} for architecture in ARCHITECTURES}
    for (architecture, _), of_source in zip(jobs, found, strict=True):
        result[architecture] |= of_source
    return result
