"""`fastbert doctor` shows what this machine has, and which backends it would run a model with."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import textwrap
from pathlib import Path
from typing import Any

from fastbert.cli.parser import add_command
from fastbert.cli.stopping import raise_if_stopped
from fastbert.native import recipe
from fastbert.native.cores import cores, usable_threads
from fastbert.version import __version__

WIDTH = 100
_DERIVATIVES = (
    "Kernels have first derivatives only: torch.func and forward mode run torch's operations, and double backward"
    ' (create_graph=True) needs fastbert.use_backend("torch")'
)
_PACKAGES = ("triton", "tokenizers", "safetensors", "transformers", "sentence-transformers")


def add(commands: Any) -> None:
    add_command(
        commands,
        "doctor",
        run,
        "what this machine has, and which kernels would run",
        "Shows versions, processor and GPU. For every operation it shows which backend serves it, and why the others"
        " do not. Exits with 1 if something must be repaired.",
        "fastbert doctor",
    )


def run(options: argparse.Namespace) -> int:
    lines, healthy = doctor_lines()
    print("\n".join(lines))
    return 0 if healthy else 1


def doctor_lines() -> tuple[list[str], bool]:
    """The report, and whether all is well."""
    import torch

    from fastbert.backend import missing_kernels

    raise_if_stopped()
    fault = torch_fault(torch.__version__)
    versions = [("fastbert", __version__), ("python", platform.python_version())]
    versions.append(("torch", torch.__version__ + (f"   <-- {fault}" if fault else "")))
    versions += [(package, _version(package)) for package in _PACKAGES]
    lines = ["Versions", *_table(versions)]
    if fault:
        return lines, False  # the rest may not even import
    lines += ["", "Machine", *_table(_machine())]
    if (missing := missing_kernels()) is not None:
        lines += textwrap.wrap(missing, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    choice = os.environ.get("FASTBERT_BACKEND", "auto")
    if choice != "auto":
        lines.append(f"  FASTBERT_BACKEND={choice} is set: every operation that has such a kernel uses it or fails")
    lines += ["", "Which backend serves each operation"]
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        lines += _backend_table(device)
    lines += ["", *textwrap.wrap(_DERIVATIVES, WIDTH, subsequent_indent="  ", break_on_hyphens=False)]
    return lines, True


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return [f"  {label:<23}{value}" for label, value in rows]


def torch_fault(version: str) -> str | None:
    """What is wrong with a version of torch; None if nothing."""
    if recipe.version_pair(version) >= recipe.OLDEST_TORCH:
        return None
    return f"too old: fastbert needs torch {recipe.dotted(recipe.OLDEST_TORCH)} or newer"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> list[tuple[str, str]]:
    import torch

    rows = [
        ("processor", f"{_cpu_model()}, {os.cpu_count()} cores"),
        ("threads", f"{usable_threads()} of {cores()}, torch {torch.get_num_threads()}"),
        ("torch's ISA", torch.backends.cpu.get_cpu_capability()),
        ("extension", _extension()),
        *_extension_file(),
        *_native_products(),
    ]
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        return [*rows, ("GPU", "none that torch can use" if built else "none: this torch is built for CPUs only")]
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        rows.append((f"GPU {i}", f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"))
    return rows


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return models[0] if models else platform.processor() or platform.machine()


def _extension() -> str:
    from fastbert.native.availability import extension_error

    error = extension_error()
    if error is not None:
        return "none: see below"
    from fastbert import _C

    return f"loaded, running {_C.isa()} kernels"


def _extension_file() -> list[tuple[str, str]]:
    """Which file it is, what it was built from and against, and what is wrong with one that `fastbert build` made."""
    import torch

    from fastbert.native import cache

    rows = []
    if (build := cache.loaded()) is not None:
        rows.append(("", str(build.path)))
        if built := build.stamp:
            cuda = f"with CUDA {built['cuda']}" if built["cuda"] else "without the CUDA part"
            rows.append(("", f"built against torch {built['torch']}, for {built['target']} and newer, {cuda}"))
            rows.append(("", f"by {built['compiler']}"))
            if built["sources"] != recipe.source_hash():
                rows.append(("", "its sources have changed since: build it again"))
        else:
            rows.append(("", "not known what it was built against"))
    _, stale = cache.find(torch.__version__)
    return rows if stale is None else [*rows, ("cache", stale)]


def _native_products() -> list[tuple[str, str]]:
    """Whether the best kernels are built, whose products are used, and what bfloat16 and int8 are multiplied with."""
    from fastbert.native.availability import extension_error, isa_left_out

    if extension_error() is not None:
        return []
    from fastbert import _C

    left_out = isa_left_out()
    bf16 = "multiplied natively" if _C.has_bf16() else "no instruction for it: bfloat16 checkpoints compute in float32"
    vnni = _C.isa() not in ("generic", "avx2", "avx512")
    int8 = "multiplied natively (VNNI)" if vnni else "no instruction for it: exact, but slower than it could be"
    torchs = "torch's own: none of ours are written for this processor"
    rows = [] if left_out is None else [("kernels", left_out)]
    return [*rows, *([] if _C.has_products() else [("products", torchs)]), ("bfloat16", bf16), ("int8", int8)]


def _backend_table(device: str) -> list[str]:
    """A table for each group of dtypes that are served alike, with the reasons as notes below it."""
    import torch

    from fastbert.backend import Backend, asked_for
    from fastbert.backend_report import backends

    reports = {dtype: backends(device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    groups = [list(reports)] if reports[torch.float32] == reports[torch.bfloat16] else [[dtype] for dtype in reports]
    lines = []
    for dtypes in groups:
        report, notes = reports[dtypes[0]], []
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        lines += [f"  {f'{device}, {names}':<32}" + "".join(f"{backend.value:<11}" for backend in Backend).rstrip()]
        for op, row in report.items():
            cells = []
            for backend in Backend:
                reason = row.get(backend.value, "")
                if reason and reason not in notes:
                    notes.append(reason)
                served = "serves" if row["selected"] == backend.value else "could"
                # What was asked for by name and is there for this operation, but not for these tensors.
                refused = "fails" if row["selected"] == "none" and asked_for(None) is backend else "no"
                cells.append(f"{f'{refused} [{notes.index(reason) + 1}]' if reason else served:<11}")
            lines.append(f"    {op:<30}" + "".join(cells).rstrip())
        for i, note in enumerate(notes, 1):
            lines += textwrap.wrap(f"[{i}] {note}", WIDTH, initial_indent="    ", subsequent_indent="        ")
        lines.append("")
    return lines[:-1]
