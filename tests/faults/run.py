"""Puts past faults back, one at a time, and looks whether the tests still see them.

    python tests/faults/run.py                                all of them
    python tests/faults/run.py data-pad-counted serve-late    some, by the names of their files
    python tests/faults/run.py --seen-by-only                 no more than the tests that a patch names

Each patch in this folder is one fault that fastbert once had, as it would be in today's code; or, where no past fault
was near, one that it never had ("never made"). Its first lines say what goes wrong for the user, which commit mended it
(`Mended by:`), and which tests are the first to ask (`Seen by:`). Where these pass, the rest of the suite is asked, but
for what `make test-full` has. The exit status is 1 when nothing sees a fault.

The checkout itself is not touched: its files are copied to build/faults, and the patch is applied there. That folder
is kept. Compiler commands hold the folder's name, so the first patch of csrc/ compiles everything; later ones, and
later runs, compile only what has changed.

A patch is made with `git diff` in a clean checkout, and its three lines are written above it. A patch that no longer
applies is mended in the same way: put the fault into the new code by hand.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

FAULTS = Path(__file__).resolve().parent
ROOT = FAULTS.parents[1]
COPY = ROOT / "build" / "faults"


class Fault(NamedTuple):
    name: str
    patch: Path
    what: str
    mended_by: str
    seen_by: list[str]
    changes: list[str]


def read(patch: Path) -> Fault:
    text = patch.read_text(encoding="utf-8")
    header = re.match(r"(.+)\nMended by: (.+)\nSeen by: (.+)\n\s*diff --git ", text)
    if header is None:
        raise SystemExit(f"{patch.name} does not begin with what goes wrong, `Mended by:` and `Seen by:`")
    changes = re.findall(r"^\+\+\+ b/(.+)$", text, re.MULTILINE)
    return Fault(patch.stem, patch, header[1], header[2], header[3].split(), changes)


def faults() -> list[Fault]:
    return [read(patch) for patch in sorted(FAULTS.glob("*.patch"))]


def apply(fault: Fault, tree: Path, *options: str) -> str:
    """What git says against it, or nothing. A repository further up is not to be found: git would go by its root."""
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(["git", "apply", *options, fault.patch], cwd=tree, env=env, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def renew_copy() -> None:
    """Only what differs is written, so that nothing else is compiled again."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    wanted = {Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    wanted |= {path.relative_to(ROOT) for path in ROOT.glob("fastbert/_C*")}
    for path in COPY.rglob("*"):
        relative = path.relative_to(COPY)
        if path.is_file() and relative not in wanted and not {"build", "__pycache__"} & {*relative.parts}:
            path.unlink()
    for relative in wanted:
        if not (COPY / relative).is_file() or not filecmp.cmp(ROOT / relative, COPY / relative, shallow=False):
            (COPY / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / relative, COPY / relative)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(COPY)}
    return subprocess.run([sys.executable, *arguments], cwd=COPY, env=env, capture_output=True, text=True)


def failing(*arguments: str) -> str | None:
    """The first test that fails, or None where all pass."""
    done = python("-m", "pytest", "-x", "-q", "-m", "not full", "-p", "no:cacheprovider", *arguments)
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"signal {-done.returncode} ends the tests"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or failed is None:
        raise SystemExit(f"pytest {' '.join(arguments)} did not run:\n{(done.stdout + done.stderr)[-3000:]}")
    return failed[1]


def caught_by(fault: Fault, seen_by_only: bool) -> str | None:
    renew_copy()
    if against := apply(fault, COPY):
        raise SystemExit(f"{fault.name} does not apply: {against}")
    if any(path.startswith("csrc/") for path in fault.changes):
        done = python("setup.py", "build_ext", "--inplace")
        if done.returncode or "with the C++ kernels" not in done.stdout:
            raise SystemExit(f"{fault.name} does not compile:\n{(done.stdout + done.stderr)[-3000:]}")
    # The test of the patches themselves would fail in a tree that has one of them.
    rest = ("-n", "2", "--dist", "worksteal", "--ignore", "tests/project/test_past_faults.py")
    return failing(*fault.seen_by) or (None if seen_by_only else failing(*rest))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="faults, by the names of their files; all of them if none is named")
    parser.add_argument("--seen-by-only", action="store_true", help="do not ask the rest of the default suite")
    options = parser.parse_args()
    known = {fault.name: fault for fault in faults()}
    names = [name.removesuffix(".patch") for name in options.names] or [*known]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no fault {unknown[0]}; the faults are {', '.join(known)}")
    missed = 0
    print("| fault | caught by | seconds |\n|---|---|---|", flush=True)
    for name in names:
        began = time.monotonic()
        test = caught_by(known[name], options.seen_by_only)
        missed += test is None
        print(f"| {name} | {test or '**nothing**'} | {time.monotonic() - began:.0f} |", flush=True)
    print(f"\n{len(names) - missed} of {len(names)} faults are caught.")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
