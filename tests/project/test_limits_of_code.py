"""What holds code to a size that a reader takes in: by meaning, not by the lines of a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("fastbert", "benchmarks", "tests", "examples")
LINES_OF_A_FUNCTION, A_TABLE = 60, 8


def trees() -> Iterator[tuple[Path, list[str], ast.Module]]:
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        yield path.relative_to(ROOT), text.splitlines(), ast.parse(text)


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Of its body: without the docstring, comments and blanks."""
    body = function.body[ast.get_docstring(function, clean=False) is not None :]
    if not body:
        return 0
    inside = [line.strip() for line in lines[body[0].lineno - 1 : function.end_lineno]]
    return sum(bool(line) and not line.startswith("#") for line in inside)


def test_a_function_is_read_at_once():
    """A Triton kernel (kernels/) may be longer: it is one function, whatever it does."""
    functions = (
        (f"{path}: {node.name}", lines_of(node, lines))
        for path, lines, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert not {name: size for name, size in functions if size > LINES_OF_A_FUNCTION}


def numbers_before(line: int, tree: ast.Module) -> int:
    """How many numbers stand in the statement or decorator that ends there."""
    ending = [node for node in ast.walk(tree) if getattr(node, "end_lineno", None) == line]
    whole = min(ending, key=lambda node: node.lineno)  # type: ignore[attr-defined]
    constants = (node.value for node in ast.walk(whole) if isinstance(node, ast.Constant))
    return sum(isinstance(value, int | float) and not isinstance(value, bool) for value in constants)


def test_only_tables_of_numbers_keep_a_form_of_their_own():
    """In kernels/ so do a kernel's arguments: pointers, strides, sizes and flags, a row of each."""
    skipped = (
        (f"{path}:{at}", numbers_before(at, tree))
        for path, lines, tree in trees()
        for at, line in enumerate(lines, 1)
        if line.endswith("# fmt: " + "skip")
    )
    assert not {place: count for place, count in skipped if count < A_TABLE}
