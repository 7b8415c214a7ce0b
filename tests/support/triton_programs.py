"""Programs with the real compiler of Triton, which does not run in a process that has the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from built import ROOT, built


def facts_of(program: Path, arguments: tuple[str, ...], imports: Iterable[Path]) -> Any:
    """What `program` prints in its last line, as JSON: once for the same contents of it and of what it `imports`."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *(p for p in sys.path if p)])
    parts = [program, *sorted(Path(__file__).parent.glob("*.py")), *sorted(ROOT.glob("kernels/*.py")), *sorted(imports)]

    def make(facts: Path) -> None:
        done = subprocess.run(
            [sys.executable, str(program), *arguments], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr[-3000:]
        facts.write_text(done.stdout.splitlines()[-1], encoding="utf-8")

    key = (arguments, sys.version_info, triton.__version__, torch.__version__)
    name = "-".join((program.stem, *arguments))
    return json.loads(built("triton-facts", name, key, parts, make).read_text(encoding="utf-8"))
