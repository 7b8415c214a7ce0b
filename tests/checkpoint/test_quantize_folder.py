"""`fastbert quantize` that is killed, or has no room: the folder is there whole or not at all, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import tiny
from command_line import run_here, run_python
from full import left_to_full

from fastbert.checkpoint.saving import BESIDE
from fastbert.models.auto import AutoModel
from fastbert.models.quantized import is_quantized

# Runs the command line, whose files may have so many bytes.
LIMITED = """
import os, resource, sys
from pathlib import Path
if limit := int(sys.argv.pop(1)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from fastbert.cli import main
sys.exit(main())
"""
# The same, and it is killed before a whole folder is renamed.
KILLED = """
import signal
replace = os.replace
def kill(source, goal):
    if Path(source).is_dir():
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, goal)
os.replace = kill
"""


def run(program: str, *arguments: object, largest_file: int = 0) -> subprocess.CompletedProcess:
    return run_python([sys.executable, "-c", program, largest_file, "quantize", *arguments])


@pytest.fixture
def source(tmp_path):
    folder = tiny.write_model(tmp_path / "float")
    (folder / f"{BESIDE}dead").mkdir()  # what a killed save left
    (folder / ".tokenizer.json.here.0123.partial").touch()
    return folder


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_killed(source, tmp_path):
    out = tmp_path / "int8"
    done = run(LIMITED.replace("from fastbert", f"{KILLED}from fastbert"), source, out)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists() and [name for name in names(tmp_path) if name.startswith(BESIDE)]
    done = run_here("quantize", source, out)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path) == ["float", "int8"]
    assert names(out) == [name for name in names(source) if not name.startswith((BESIDE, ".tokenizer"))]
    assert is_quantized(AutoModel.from_pretrained(out))


@left_to_full(lambda p: p["what"] == "a copied file")  # written at the same place
@pytest.mark.parametrize("what", ["a copied file", "the weights"])
def test_full_disk(what, source, tmp_path):
    """One line of error, and everything is as it was."""
    size = os.path.getsize(source / "tokenizer.json")
    if what == "a copied file":
        (source / "large.json").write_bytes(b" " * 10 * size)
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    out = tmp_path / "int8"
    done = run(LIMITED, source, out, largest_file=size)
    assert done.returncode == 2 and done.stderr.startswith("fastbert: error: ") and done.stderr.count("\n") == 1
    assert "cannot be written" in done.stderr and "File too large" in done.stderr
    assert names(tmp_path) == ["float"]
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
