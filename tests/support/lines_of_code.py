"""python tests/support/lines_of_code.py COMMIT [COMMIT ...]: lines of the package's code by folder, without docstrings,
comments and blanks. All commits are written in one form before (`ruff format`, and no `# fmt: skip`).
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str, tree: ast.Module) -> list[bool]:
    """Of each line whether it is code."""
    lines = [line.strip() for line in text.splitlines()]
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno
            assert last is not None
            lines[first - 1 : last] = [""] * (last - first + 1)
    return [bool(line) and not line.startswith("#") for line in lines]


def lines_of(text: str) -> int:
    return sum(code_lines(text, ast.parse(text)))


def count(commit: str) -> Counter[str]:
    archive = subprocess.run(
        ["git", "archive", commit, "fastbert", "pyproject.toml"], cwd=ROOT, capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        package = Path(folder) / "fastbert"
        for path in package.rglob("*.py"):
            path.write_text(path.read_text(encoding="utf-8").replace("  # fmt: skip", ""), encoding="utf-8")
        subprocess.run([sys.executable, "-m", "ruff", "format", "-q", "fastbert"], cwd=folder, check=True)
        found = Counter[str]()
        for path in package.rglob("*.py"):
            inside = path.relative_to(package)
            found[inside.parts[0] if len(inside.parts) > 1 else "top"] += lines_of(path.read_text(encoding="utf-8"))
    return found


def main() -> None:
    commits = sys.argv[1:]
    counts = [count(commit) for commit in commits]
    rows = [(room, *[each[room] for each in counts]) for room in sorted({room for each in counts for room in each})]
    rows = [("", *commits), *rows, ("all", *[each.total() for each in counts])]
    for name, *others in rows:
        sys.stdout.write(f"{name:14}" + "".join(f"{other:>12}" for other in others) + "\n")


if __name__ == "__main__":
    main()
