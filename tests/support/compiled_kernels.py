"""Every Triton kernel, compiled ahead of time for GPUs that need not be here: a program that prints what came of it.

tests/support/facts.py starts it, since a process has either Triton's compiler or its interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from aot_cases import SHARED_LIMIT, Case, all_cases
from built import ROOT
from machine_code import copies_before_reads_end, single_buffers

# What a multiprocessor has of it.
SHARED_TOTAL = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
TABLE = ROOT / "benchmarks" / "results" / "aot" / "triton.md"


def all_kernels() -> set[str]:
    """The name of every kernel in the kernels/ folder, `module._name_kernel`."""
    import importlib
    import pkgutil

    import fastbert.kernels

    names = set()
    for module in pkgutil.iter_modules(fastbert.kernels.__path__):
        members = vars(importlib.import_module(f"fastbert.kernels.{module.name}"))
        names |= {f"{module.name}.{name}" for name in members if name.endswith("_kernel")}
    return names


def compile_case(case: Case, capability: int) -> dict:
    import importlib
    import tempfile

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks.gpu.kernels import complaints

    module, name = case.kernel.split(".")
    kernel = getattr(importlib.import_module(f"fastbert.kernels.{module}"), name)
    signature = {arg: "constexpr" if arg in case.constants else case.types[arg] for arg in kernel.arg_names}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, arg in enumerate(kernel.arg_names)
        if signature[arg].startswith("*") or arg in ("hidden_size", "width", "N", "K") or arg.startswith("stride")
    }
    source = ASTSource(kernel, signature, case.constants, divisible)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tools = triton.knobs.nvidia
        usage, sass = (
            subprocess.run([*command, cubin.name], capture_output=True, text=True, check=True).stdout
            for command in (
                (tools.cuobjdump.path, "--dump-resource-usage"),
                (tools.nvdisasm.path, "--print-code", "--no-dataflow"),  # jumps' targets, which take half the time
            )
        )
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(compiled.asm["ptx"])
        ptx.flush()
        serialised = complaints(Path(ptx.name), capability) if "wgmma.mma_async" in compiled.asm["ptx"] else []
    found = {key: int(re.search(rf"{key}:(\d+)", usage).group(1)) for key in ("REG", "STACK", "LOCAL")}  # type: ignore[union-attr]
    warps = compiled.metadata.num_warps
    by_registers = 65536 // (-(-found["REG"] // 8) * 8 * 32 * warps)
    by_shared = SHARED_TOTAL[capability] // (compiled.metadata.shared + 1024)
    return {
        "registers": found["REG"],
        "stack": found["STACK"],
        "local": found["LOCAL"],
        "shared": compiled.metadata.shared,
        "warps": warps,
        "resident": min(by_registers, by_shared, 64 // warps, 32),
        "loads": Counter(re.findall(r"\b(?:LDG|LDGSTS)\.\S+", sass)),
        "early_copies": copies_before_reads_end(compiled.asm["llir"]),
        "single": single_buffers(compiled.asm["ttgir"]),
        "serialised": serialised,
        "products": sorted(set(re.findall(r"\b(HGMMA|HMMA|UTCHMMA|FFMA)\b", sass))),
    }


def compile_everywhere(case: Case) -> dict[str, dict]:
    """By architecture."""
    return {str(c): compile_case(case, c) for c in SHARED_LIMIT if case.major in (0, c // 10)}


def table(cases: dict[str, dict]) -> str:
    """Registers a thread, KiB of shared memory a block, and warps of 64 that a multiprocessor holds at once."""
    lines = [
        "# Registers, shared memory and occupancy of the Triton kernels",
        "",
        "Written by `make facts`, of tests/gpu/facts/triton.json. Registers a thread / KiB of shared memory a block /"
        " warps resident on a multiprocessor, of 64.",
        "",
        "| kernel | sm_80 | sm_90 | sm_100 |",
        "|---|---|---|---|",
    ]
    for name, case in cases.items():
        cells = []
        for capability in SHARED_LIMIT:
            facts = case["facts"].get(str(capability))
            cells.append(
                f"{facts['registers']} / {facts['shared'] / 1024:.1f} / {facts['resident'] * facts['warps']}"
                if facts
                else "-"
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    cases = all_cases()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        facts = list(pool.map(compile_everywhere, cases))
    report = {
        case.id: {
            "kernel": case.kernel,
            "wide_loads": case.wide_loads,
            "has_products": case.has_products,
            "narrow_loads": case.narrow_loads,
            "facts": by_architecture,
        }
        for case, by_architecture in zip(cases, facts, strict=True)
    }
    assert len(report) == len(cases)
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
