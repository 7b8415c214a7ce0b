"""Every Triton kernel, compiled for GPUs that need not be here: none spills, and shared memory suffices."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from built import ROOT, built

from fastbert.native.availability import triton_error

PROGRAM = ROOT / "tests" / "support" / "compiled_ops.py"


@pytest.mark.parametrize(
    "capability,dtype,forms",
    [
        ("90", "bfloat16", "once"),
        *(
            pytest.param(capability, dtype, forms, marks=pytest.mark.full)
            for capability in ("80", "90", "100")
            for dtype, forms in (("bfloat16", "all"), ("float32", "once"))
        ),
    ],
)
def test_every_kernel_compiles_and_none_spills(capability, dtype, forms):
    if (reason := triton_error()) is not None:
        pytest.skip(reason)
    import triton

    arguments = [str(PROGRAM), capability, dtype, *([] if forms == "all" else [forms])]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), environment.get("PYTHONPATH", "")))

    def make(path):
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        path.write_text(done.stdout)

    parts = [PROGRAM, *sorted(ROOT.glob("kernels/*.py")), *sorted(ROOT.glob("fastbert/ops/**/*.py"))]
    found = built("aot", "-".join(arguments[1:]), (triton.__version__, torch.__version__), parts, make)
    assert json.loads(found.read_text()) == {"missing": [], "spilling": []}
