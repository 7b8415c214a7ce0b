"""The list of past faults fits this tree: it does not take a run of tests/faults/run.py to find that out."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("run_faults", ROOT / "tests/faults/run.py")
assert spec is not None and spec.loader is not None
run_faults = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_faults)
FAULTS = run_faults.faults()  # which have a header each


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies them")
def test_every_fault_can_be_put_back():
    against = {fault.name: said for fault in FAULTS if (said := run_faults.apply(fault, ROOT, "--check"))}
    assert not against, f"put them into the code as it is now: {against}"


def test_who_is_to_see_them_is_there():
    for fault in FAULTS:
        for asked in fault.seen_by:
            path, _, name = asked.partition("::")
            text = (ROOT / path).read_text(encoding="utf-8")
            assert path.startswith("tests/") and (not name or re.search(rf"^def {name}\(", text, re.MULTILINE)), asked


def test_faults_are_in_the_code_alone():
    """A changed test, or a fault without a description, would prove nothing."""
    for fault in FAULTS:
        assert fault.changes and all(path.startswith(("csrc/", "fastbert/", "kernels/")) for path in fault.changes)
        assert fault.what.endswith(".") and fault.mended_by and fault.seen_by, fault.name
