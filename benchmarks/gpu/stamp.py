"""Which sources, commit and machine a GPU result comes from."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import time
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

import fastbert
from fastbert.bench.timing import cpu_name
from fastbert.native.availability import cuda_error, extension_error

PACKAGE = Path(fastbert.__file__).resolve().parent
ROOT = PACKAGE.parent
RESULTS = ROOT / "benchmarks" / "results"
SOURCES = (
    "kernels",
    "csrc/cuda",
    "csrc/ops/cuda",
    "csrc/include",
    "fastbert/ops",
)  # what decides a kernel's results and times
SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp"}


def source_hashes(root: Path = ROOT) -> dict[str, str]:
    """{path below the checkout: hash} of everything that GPU results depend on."""
    folders = [root / folder for folder in SOURCES]
    if not folders[0].is_dir():  # installed: the mapping of pyproject.toml
        folders[0] = root / "fastbert" / "kernels"
    files = [f for folder in folders for f in sorted(folder.rglob("*")) if f.suffix in SUFFIXES]
    return {f.relative_to(root).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest()[:16] for f in files}


def kernel_hash(sources: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:16]


def _output(*command: str) -> str | None:
    """A command's output; None where it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=30)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    if util.find_spec(package) is None:
        return None
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # builds of Triton go by several distribution names
        return "unknown"


def gpu_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def slug(name: str) -> str:
    """A folder's name: "NVIDIA H200" -> "nvidia-h200"."""
    return "-".join("".join(c.lower() if c.isalnum() else " " for c in name).split())


def make_stamp(commit: str | None = None) -> dict[str, Any]:
    """What every result must say of itself. `commit`: where the checkout came without its git folder."""
    sources = source_hashes()
    changes = _output("git", "status", "--porcelain", "--untracked-files=no")
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    packages = ("triton", "transformers")
    return {
        "commit": commit or _output("git", "rev-parse", "--short=12", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "kernel_hash": kernel_hash(sources),
        "sources": sources,
        "gpu": gpu_name(),
        "cpu": cpu_name(),
        "driver": driver.splitlines()[0] if driver else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        **{name: _version(name) for name in packages},
        "extension": None if extension_error() else "cpu" if cuda_error() else "cpu and cuda",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


IDENTITY = (
    "commit",
    "kernel_hash",
    "gpu",
    "cpu",
    "torch",
    "triton",
    "extension",
)  # results that agree in these may stand in one table


def same_run(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in IDENTITY)
