"""Every Triton kernel, compiled ahead of time for GPUs that need not be here, and what the machine code then tells.

The compiler does not run in a process whose Triton is the interpreter, so the tests start this file as a program.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest

HIDDEN_SIZE = 768  # BERT-base; divisible by 16, as launchers' arguments are when loads may be 16 bytes wide
# Shared memory that one block may have, in bytes (CUDA C++ Programming Guide, table "Technical Specifications").
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclasses.dataclass(frozen=True)
class Case:
    """One compilation: `types` by argument name, `constants` for the constexpr arguments and the pointers not given."""

    kernel: str
    dtype: str
    types: dict
    constants: dict
    num_warps: int
    wide_loads: int  # matrices and vectors in `dtype` that are read, each in loads of 16 bytes

    @property
    def id(self) -> str:
        return f"{self.kernel}-{self.dtype}{'-dropout' if self.constants.get('HAS_DROPOUT') else ''}"


def layer_norm_cases():
    from fastbert.kernels import layer_norm

    for dtype, dropout in (("bf16", False), ("bf16", True), ("fp16", True), ("fp32", True)):
        pointer = f"*{dtype}"
        no_mask = {} if dropout else {"philox_ptr": None}
        block_n, num_warps = layer_norm._fwd_tile(HIDDEN_SIZE)
        types = {
            **dict.fromkeys(("x_ptr", "x_bias_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "out_ptr"), pointer),
            "summed_ptr": pointer, "mean_ptr": "*fp32", "rstd_ptr": "*fp32", "philox_ptr": "*i64",
            "hidden_size": "i32", "threshold": "i64", "scale": "fp32", "eps": "fp32",
        }  # fmt: skip
        flags = ("HAS_X_BIAS", "HAS_RESIDUAL", "HAS_BIAS", "RETURN_SUM", "RETURN_STATS")
        constants = {**dict.fromkeys(flags, True), "HAS_DROPOUT": dropout, "BLOCK_N": block_n, **no_mask}
        yield Case("layer_norm._add_layer_norm_fwd_kernel", dtype, types, constants, num_warps, wide_loads=5)

        block_m, block_n, num_warps = layer_norm._bwd_tile(HIDDEN_SIZE)
        types = {
            **dict.fromkeys(("dout_ptr", "dsum_ptr", "summed_ptr", "weight_ptr", "dx_ptr", "dsummed_ptr"), pointer),
            "mean_ptr": "*fp32", "rstd_ptr": "*fp32", "philox_ptr": "*i64", "shares_ptr": "*fp32",
            "total_tokens": "i32", "hidden_size": "i32", "threshold": "i64", "scale": "fp32",
        }  # fmt: skip
        constants = {"HAS_DSUM": True, "HAS_X_BIAS": True, "HAS_DROPOUT": dropout, **no_mask}
        constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n}
        yield Case("layer_norm._add_layer_norm_bwd_kernel", dtype, types, constants, num_warps, wide_loads=4)

    for dtype in ("bf16", "fp16", "fp32"):
        types = dict.fromkeys(("dweight_ptr", "dbias_ptr", "dx_bias_ptr"), f"*{dtype}")
        types |= {"shares_ptr": "*fp32", "num_shares": "i32", "hidden_size": "i32"}
        constants = {"BLOCK_M": 32, "BLOCK_N": 32}
        yield Case("layer_norm._add_shares_kernel", dtype, types, constants, num_warps=4, wide_loads=1)


def all_cases():
    return list(layer_norm_cases())


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

    module, name = case.kernel.split(".")
    kernel = getattr(importlib.import_module(f"fastbert.kernels.{module}"), name)
    signature = {arg: "constexpr" if arg in case.constants else case.types[arg] for arg in kernel.arg_names}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, arg in enumerate(kernel.arg_names)
        if signature[arg].startswith("*") or arg == "hidden_size"
    }
    source = ASTSource(kernel, signature, case.constants, divisible)
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options={"num_warps": case.num_warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage, sass = (
            subprocess.run([tool, option, cubin.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    return {
        "stack": int(re.search(r"STACK:(\d+)", usage).group(1)),
        "local": int(re.search(r"LOCAL:(\d+)", usage).group(1)),
        "shared": compiled.metadata.shared,
        "loads": re.findall(r"\bLDG\.\S+", sass),
    }


@pytest.fixture(scope="module")
def compiled():
    """{case id: {capability: facts}}, and the kernels that exist, from a process with the real compiler."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    process = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_every_kernel_is_compiled(compiled):
    assert compiled["kernels"] == sorted({facts["kernel"] for facts in compiled["cases"].values()})


@pytest.mark.parametrize("capability", SHARED_LIMIT, ids=lambda c: f"sm_{c}")
def test_registers_and_shared_memory_suffice(compiled, capability):
    for name, case in compiled["cases"].items():
        facts = case["facts"][str(capability)]
        assert facts["stack"] == facts["local"] == 0, f"{name} spills registers: {facts}"
        assert facts["shared"] <= SHARED_LIMIT[capability], f"{name}: {facts['shared']} bytes of shared memory"


@pytest.mark.parametrize("capability", SHARED_LIMIT, ids=lambda c: f"sm_{c}")
def test_loads_are_16_bytes_wide(compiled, capability):
    for name, case in compiled["cases"].items():
        loads = case["facts"][str(capability)]["loads"]
        assert sum(".128" in load for load in loads) >= case["wide_loads"], f"{name}: {loads}"
        assert not [load for load in loads if ".U16" in load or ".U8" in load], f"{name}: {loads}"


def main() -> None:
    cases = {
        case.id: {
            "kernel": case.kernel,
            "wide_loads": case.wide_loads,
            "facts": {capability: compile_case(case, capability) for capability in SHARED_LIMIT},
        }
        for case in all_cases()
    }
    sys.stdout.write(json.dumps({"kernels": sorted(all_kernels()), "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
