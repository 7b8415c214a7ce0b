"""What compilers make of the GPU kernels, kept in tests/gpu/facts/: compiling all of them takes minutes.

    PYTHONPATH=.:tests/support python tests/support/facts.py [triton] [launches] [cuda]     (`make facts`: all three)

writes the files. `make test` checks what is in them, `make test-full` makes the facts anew and compares. A file says of
which sources and by which compiler it was made; where these are others now, what it holds is old.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compiled_kernels
import cubins
from aot_cases import SHARED_LIMIT
from built import ROOT

FOLDER = ROOT / "tests" / "gpu" / "facts"
Facts = dict[str, Any]
LAUNCHING = "what launches"
_LAUNCHES = re.compile(r"fastbert\.kernels|define_triton|ops\.layers\.gpu")


def triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return f"triton {triton.__version__}"


def printed(program: str, *arguments: str) -> Any:
    """What a program prints in its last line, as JSON: with the real compiler, not the interpreter that tests have."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *(p for p in sys.path if p)])
    command = [sys.executable, str(Path(__file__).parent / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class Kind:
    """Facts of one kind: of which files they are made, by which compiler (None: it is not here), and how."""

    sources: tuple[str, ...]
    compiler: Callable[[], str | None]
    make: Callable[[], Facts]


KINDS = {
    # Registers, shared memory and instructions of every kernel, with the blocks that it ships, by case.
    "triton": Kind(
        (
            "kernels/*.py",
            "tests/support/aot_cases*.py",
            "tests/support/compiled_kernels.py",
            "tests/support/machine_code.py",
        ),
        triton_version,
        lambda: printed("compiled_kernels.py"),
    ),
    # What models launch and what then compiles, by architecture.
    "launches": Kind(
        (
            "kernels/*.py",
            LAUNCHING,
            "tests/support/dry_launches.py",
            "tests/support/dry_ops.py",
            "benchmarks/gpu/rowwise.py",
        ),
        triton_version,
        lambda: {str(capability): printed("dry_launches.py", str(capability)) for capability in SHARED_LIMIT},
    ),
    # Registers, stack and loads of every kernel of csrc/cuda, by architecture.
    "cuda": Kind(
        (
            "csrc/cuda/*",
            "csrc/include/activation.h",
            "csrc/include/dropout*.h",
            "csrc/include/philox.h",
            "csrc/include/inline.h",
            "tests/support/cubins.py",
        ),
        cubins.nvcc_version,
        cubins.facts,
    ),
}


def files_of(sources: tuple[str, ...]) -> list[Path]:
    """What patterns name; LAUNCHING: the modules of ops that make launches, or memory for them."""
    found = {path for pattern in sources for path in ROOT.glob(pattern) if path.is_file()}
    if LAUNCHING in sources:
        found |= {
            path for path in ROOT.glob("fastbert/ops/**/*.py") if _LAUNCHES.search(path.read_text(encoding="utf-8"))
        }
    return sorted(found)


def sources_of(kind: str) -> str:
    """A hash of the names and contents of the files that the facts are made of."""
    digest = hashlib.sha256()
    for path in files_of(KINDS[kind].sources):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def kept(kind: str) -> Facts:
    """What the file holds. Raises AssertionError where its sources, or the compiler that is here, are others now."""
    content = json.loads((FOLDER / f"{kind}.json").read_text(encoding="utf-8"))
    made_of, compiler = content["made of"], KINDS[kind].compiler()
    now = {"sources": sources_of(kind), "compiler": made_of["compiler"] if compiler is None else compiler}
    assert made_of == now, f"tests/gpu/facts/{kind}.json is of {made_of}, and here is {now}: run `make facts`"
    return content["facts"]


def write(kind: str) -> None:
    made_of = {"sources": sources_of(kind), "compiler": KINDS[kind].compiler()}
    if made_of["compiler"] is None:
        sys.exit(f"{kind}: the compiler is not here")
    facts = KINDS[kind].make()
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(fact, sort_keys=True)}" for name, fact in facts.items())
    text = f'{{\n "made of": {json.dumps(made_of)},\n "facts": {{\n{lines}\n }}\n}}\n'
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{kind}.json").write_text(text, encoding="utf-8")
    if kind == "triton":
        compiled_kernels.TABLE.write_text(compiled_kernels.table(facts), encoding="utf-8")


def main() -> None:
    unknown = [name for name in sys.argv[1:] if name not in KINDS]
    if unknown:
        sys.exit(f"{unknown[0]} is none of {', '.join(KINDS)}")
    for kind in sys.argv[1:] or KINDS:
        write(kind)


if __name__ == "__main__":
    main()
