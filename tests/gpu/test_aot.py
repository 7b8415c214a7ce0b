"""Every Triton kernel, compiled ahead of time for GPUs that need not be here, and what the machine code then tells.

The tests start this file as a program (tests/support/triton_programs.py). Run by hand with --write it also writes the
table of registers, shared memory and occupancy that is kept with the results.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import pytest
from aot_cases import SHARED_LIMIT, Case, all_cases, is_left_to_full
from built import ROOT
from machine_code import copies_before_reads_end, single_buffers
from triton_programs import facts_of

pytestmark = pytest.mark.dear_to_set_up
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
        if signature[arg].startswith("*") or arg in ("hidden_size", "N", "K") or arg.startswith("stride")
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
        "loads": re.findall(r"\b(?:LDG|LDGSTS)\.\S+", sass),
        "early_copies": copies_before_reads_end(compiled.asm["llir"]),
        "single": single_buffers(compiled.asm["ttgir"]),
        "serialised": serialised,
        "products": sorted(set(re.findall(r"\b(HGMMA|HMMA|UTCHMMA|FFMA)\b", sass))),
    }


def compile_everywhere(case: Case, capabilities: tuple[int, ...]) -> dict[int, dict]:
    return {c: compile_case(case, c) for c in capabilities if case.major in (0, c // 10)}


def table(cases: dict[str, dict]) -> str:
    """Registers a thread, KiB of shared memory a block, and warps of 64 that a multiprocessor holds at once."""
    lines = [
        "# Registers, shared memory and occupancy of the Triton kernels",
        "",
        "Written by `PYTHONPATH=.:tests/support python tests/gpu/test_aot.py --write`, checked by `make test` (sm_90)"
        " and `make test-full`. Registers a thread / KiB of shared memory a block / warps resident on a multiprocessor,"
        " of 64.",
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


EVERYTHING = pytest.param((), id="every case and architecture", marks=pytest.mark.full)


@pytest.fixture(scope="module", params=[pytest.param(("90",), id="sm_90"), EVERYTHING])
def compiled(request):
    """{case id: {capability: facts}}, and the kernels that exist, from a process with the real compiler."""
    return facts_of(Path(__file__), request.param, ROOT.glob("benchmarks/gpu/*.py"))


def test_every_kernel_is_compiled(compiled):
    assert compiled["kernels"] == sorted({facts["kernel"] for facts in compiled["cases"].values()})


def test_registers_and_shared_memory_suffice(compiled):
    for name, case in compiled["cases"].items():
        for capability, facts in case["facts"].items():
            assert facts["stack"] == facts["local"] == 0, f"{name} spills registers: {facts}"
            limit = SHARED_LIMIT[int(capability)]
            assert facts["shared"] <= limit, f"{name} sm_{capability}: {facts['shared']} bytes of shared memory"


def test_loads_are_16_bytes_wide(compiled):
    for name, case in compiled["cases"].items():
        for capability, facts in case["facts"].items():
            loads, where = facts["loads"], f"{name} sm_{capability}"
            assert sum(".128" in load for load in loads) >= case["wide_loads"], f"{where}: {loads}"
            narrow = [load for load in loads if ".U16" in load or ".U8" in load]
            assert len(narrow) <= case["narrow_loads"], f"{where}: {loads}"


def test_what_all_threads_want_is_loaded_once(compiled):
    """The numbers of a query in attention's backward: not again by each thread, four bytes at a time."""
    for name, case in compiled["cases"].items():
        for capability, facts in case["facts"].items():
            if name.startswith("attention_"):
                small = facts["loads"].count("LDGSTS.E")
                assert small <= 8, f"{name} sm_{capability}: {small} asynchronous copies of 4 bytes"


def test_products_run_on_the_tensor_cores(compiled):
    """wgmma on Hopper, the fifth generation's instruction on Blackwell, mma on Ampere: SASS's own names."""
    for name, case in compiled["cases"].items():
        for capability, instruction in (("80", "HMMA"), ("90", "HGMMA"), ("100", "UTCHMMA")):
            facts = case["facts"].get(capability)
            if case["has_products"] and facts is not None:
                assert instruction in facts["products"], f"{name} sm_{capability}: {facts['products']}"


def test_products_of_a_warpgroup_do_not_wait_for_each_other(compiled):
    """ptxas says where it had to serialise wgmma; tests/gpu/test_gpu_tune.py provokes it."""
    for name, case in compiled["cases"].items():
        for capability, facts in case["facts"].items():
            assert facts["serialised"] == [], f"{name} sm_{capability}: {facts['serialised']}"


def test_fp32_attention_has_no_tensor_cores(compiled):
    """Its gradients want delta, a product of a block of its own, in the bits of dout v^T (attention_bwd.py)."""
    names = [name for name in compiled["cases"] if name.startswith("attention_") and "-fp32" in name]
    assert any("records" in name for name in names) and any("_dq_" in name for name in names)
    for name in names:
        for capability, facts in compiled["cases"][name]["facts"].items():
            assert set(facts["products"]) <= {"FFMA"}, f"{name} sm_{capability}: {facts['products']}"


def test_copies_wait_for_the_readers_of_what_they_overwrite(compiled):
    records = "attention_bwd._attention_dkdv_kernel-bf16-plain-64-tile128-sm_90"
    if "90" in compiled["capabilities"]:
        assert compiled["cases"][records]["facts"]["90"]["single"]["count"] > 0  # as _load_records says
    for name, case in compiled["cases"].items():
        for capability, facts in case["facts"].items():
            where, single = f"{name} sm_{capability}", facts["single"]
            assert facts["early_copies"] == [], f"{where}: {facts['early_copies']}"
            assert single["read_later"] == [], f"{where}: {single['read_later']}"
            assert set(single["waits"]) <= {"0"}, f"{where}: a wait leaves {single['waits']} copies under way"


def test_copies_that_do_not_wait_are_found():
    make = "%{} = getelementptr i8, ptr addrspace(3) getelementptr (i8, ptr addrspace(3) @global_smem, i32 {}), i32 %9"
    made = [make.format("a", 256), make.format("b", 256), make.format("c", 512)]
    copy = 'call void asm sideeffect "cp.async.ca.shared.global [ $0 + 0 ]", "r"(ptr addrspace(3) %a)'
    wait = "call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)"
    reads = {name: f"%1 = load float, ptr addrspace(3) %{name}, align 4" for name in "bc"}

    def found(*body):
        return copies_before_reads_end("\n".join([*made, "5:", *body, "br i1 %7, label %5, label %6", "6:"]))

    assert found(wait, reads["b"], wait, copy) == found(wait, reads["c"], copy) == found(wait, copy, reads["b"]) == []
    assert found(wait, reads["b"], copy) == [copy, copy]
    assert found(copy, wait, reads["b"]) == [copy]  # the next iteration's
    ttgir = "%a = ttg.local_alloc : () -> !ttg.memdesc<1x64x4xf32\n%b = ttg.memdesc_index %a[%c]\nwarp_group_dot %b, %d"
    assert single_buffers(ttgir) == {"count": 1, "read_later": ["warp_group_dot %b, %d"], "waits": []}


def test_the_table_that_is_kept_is_this_one(compiled):
    def columns(text: str) -> list[list[str]]:
        rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
        return [
            [row[0], *(row[1 + list(SHARED_LIMIT).index(int(c))] for c in compiled["capabilities"])]
            for row in rows
            if row[0].removeprefix("| ") not in compiled["left out"]
        ]

    kept = columns(TABLE.read_text(encoding="utf-8").replace(" |\n", "\n"))
    now = columns(table(compiled["cases"]).replace(" |\n", "\n"))
    assert kept == now, "run PYTHONPATH=.:tests/support python tests/gpu/test_aot.py --write"


def main() -> None:
    """Without arguments of everything; with `90` of that architecture and what `make test` has of it."""
    writes = "--write" in sys.argv
    everything = writes or len(sys.argv) == 1
    capabilities = tuple(SHARED_LIMIT) if everything else (int(sys.argv[1]),)
    left_out = [] if everything else [case.id for case in all_cases() if is_left_to_full(case)]
    cases = [case for case in all_cases() if case.id not in left_out]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        facts = list(pool.map(compile_everywhere, cases, repeat(capabilities)))
    report = {
        case.id: {
            "kernel": case.kernel,
            "wide_loads": case.wide_loads,
            "has_products": case.has_products,
            "narrow_loads": case.narrow_loads,
            "facts": {str(capability): found for capability, found in per.items()},
        }
        for case, per in zip(cases, facts, strict=True)
    }
    assert len(report) == len(cases)
    if writes:
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text(table(report), encoding="utf-8")
        return
    facts_of_all = {"kernels": sorted(all_kernels()), "capabilities": list(map(str, capabilities)), "cases": report}
    sys.stdout.write(json.dumps({**facts_of_all, "left out": left_out}) + "\n")


if __name__ == "__main__":
    main()
