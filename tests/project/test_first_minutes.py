"""README's and docs/start.md's first ten minutes, as a newcomer has them: a fresh clone, a new virtual environment, and
what the page installs. Its other blocks run in the clone's root, where Python takes the source folder, and elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import copy_checkout
from pages import blocks

from fastbert.native import recipe

FIRST = ("README.md", "start.md")
# Each page begins with the same installation; what serves, and what asks it, run together.
INSTALLATION = blocks("README.md", "bash")[0]
SERVING = ("fastbert serve ", "curl ")
COMMANDS = [
    (page, block)
    for page in FIRST
    for block in blocks(page, "bash")
    if block != INSTALLATION and not block.startswith(SERVING)
]
# An environment with torch is unpacked, the extension compiled, and the machine may be a slow one that others share.
INSTALLS_WITHIN, RUNS_WITHIN = 7200, 1800

pytestmark = [pytest.mark.full, pytest.mark.dear_to_set_up]


@dataclass(frozen=True)
class Newcomer:
    root: Path  # of the clone
    elsewhere: Path  # an empty folder
    environment: dict[str, str]
    python: str
    installed: str  # what the installation said

    def run(self, command: list[str], cwd: Path) -> str:
        """What it says. It has to end well, and must not miss the kernels."""
        return run(command, cwd, self.environment, RUNS_WITHIN)


def run(command: list[str], cwd: Path, environment: dict[str, str], within: int) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=within)
    said = done.stderr + done.stdout
    assert done.returncode == 0, said[-3000:]
    assert "several times slower" not in said, said[-3000:]  # the warning of missing kernels
    return said


def shell(commands: str) -> list[str]:
    """A failed command ends the block, also in front of a pipe."""
    return ["bash", "-e", "-o", "pipefail", "-c", commands]


@pytest.fixture(scope="module")
def newcomer() -> Iterator[Newcomer]:
    if recipe.compiler() is None:
        pytest.skip("the pages ask for a C++ compiler, and there is none")
    with tempfile.TemporaryDirectory() as folder:
        root, elsewhere, new = (Path(folder, name) for name in ("clone", "elsewhere", "venv"))
        copy_checkout(root)
        elsewhere.mkdir()
        kept = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
        constraints = str(root / "constraints.txt")
        environment = {
            **kept,
            "PATH": f"{new / 'bin'}{os.pathsep}{kept['PATH']}",
            "VIRTUAL_ENV": str(new),
            "PIP_CONSTRAINT": constraints,  # any other torch than the tested one is gigabytes
            "PIP_BUILD_CONSTRAINT": constraints,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(Path(folder, "hub")),
        }
        run([sys.executable, "-m", "venv", str(new)], root, environment, RUNS_WITHIN)
        said = run(shell(INSTALLATION), root, environment, INSTALLS_WITHIN)
        yield Newcomer(root, elsewhere, environment, str(new / "bin" / "python"), said)


@pytest.fixture(params=("root", "elsewhere"))
def place(request, newcomer) -> Path:
    return getattr(newcomer, request.param)


def test_both_pages_begin_with_the_installation_and_have_commands_then():
    assert {blocks(page, "bash")[0] for page in FIRST} == {INSTALLATION}
    assert INSTALLATION.startswith("pip install ") and INSTALLATION.endswith("\nfastbert doctor\n")
    assert [page for page, _ in COMMANDS] == list(FIRST)


LOADED = re.compile(r"^  extension +loaded, running \w+ kernels$", re.MULTILINE)


def has_kernels(said: str) -> bool:
    """What README calls a doctor's report of an installation that worked."""
    served = re.search(r"^    attention +could +serves ", said, re.MULTILINE)
    return LOADED.search(said) is not None and served is not None


def test_the_installation_has_the_kernels(newcomer):
    (shown,) = blocks("README.md", "text")
    assert LOADED.search(shown) and has_kernels(newcomer.installed), newcomer.installed[-3000:]


def test_the_first_two_commands_set_everything_up(newcomer):
    """In a clone without a virtual environment; pip has the index that it has here. `make test` is what runs this."""
    (block,) = blocks("README.md", "sh")
    commands = [line.partition("  #")[0] for line in block.splitlines()]
    assert commands[0] == "git clone URL fastbert && cd fastbert" and commands[2:] == ["make demo", "make test"]
    said = run(shell(commands[2]), newcomer.root, newcomer.environment, INSTALLS_WITHIN)
    assert re.search(r"^  fastbert +[\d,]+ tokens/s +[\d.]+ x  #+$", said, re.MULTILINE), said[-3000:]
    run(shell(f"{commands[3]} --dry-run"), newcomer.root, newcomer.environment, RUNS_WITHIN)


def test_the_kernels_are_found_here_and_there(newcomer, place):
    said = newcomer.run([newcomer.python, "-m", "fastbert", "doctor"], place)
    assert has_kernels(said), said
    assert f" {newcomer.root}/fastbert/_C" in said, said


@pytest.mark.parametrize(
    "page,block",
    [pytest.param(page, block, id=f"{page}-{i}") for page in FIRST for i, block in enumerate(blocks(page, "python"))],
)
def test_code_of_the_page_runs(newcomer, place, page, block):
    said = newcomer.run([newcomer.python, "-c", block], place)
    for shown in re.findall(r"^print\(.*#.*(\[[^]]*\])", block, re.MULTILINE):
        assert shown in said


@pytest.mark.parametrize("page,block", COMMANDS, ids=[page for page, _ in COMMANDS])
def test_commands_of_the_page_run(newcomer, page, block):
    newcomer.run(shell(block), newcomer.root)


def test_the_page_serves_and_asks(newcomer):
    """At a free port instead of the page's, which someone may have."""
    serve, ask = (block for block in blocks("start.md", "bash") if block.startswith(SERVING))
    command = shell(f"exec {serve.strip()} --port 0")
    process = subprocess.Popen(command, cwd=newcomer.root, env=newcomer.environment, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        found = re.search(r"at http://127\.0\.0\.1:(\d+), described at", line)
        assert found is not None, line + process.stderr.read()
        assert ask.count("localhost:8080/") == 1
        answer = newcomer.run(shell(ask.replace(":8080/", f":{found[1]}/")), newcomer.elsewhere).splitlines()[-1]
        assert [len(vector) for vector in json.loads(answer)] == [384, 384]
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=RUNS_WITHIN)[1]
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, said) == (0, "fastbert: stopped: answered 1, refused 0\n")
