"""What holds code to a size that a reader takes in: by meaning, not by the lines of a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from lines_of_code import code_lines

ROOT = Path(__file__).parents[2]
FOLDERS = ("fastbert", "benchmarks", "tests", "examples")
LINES_OF_A_FUNCTION, A_TABLE = 60, 8


def trees() -> Iterator[tuple[Path, str, ast.Module]]:
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        yield path.relative_to(ROOT), text, ast.parse(text)


def test_a_function_is_read_at_once():
    """By the lines of its body. A Triton kernel (kernels/) may be longer: it is one function, whatever it does."""
    functions = (
        (f"{path}: {node.name}", sum(is_code[node.body[0].lineno - 1 : node.end_lineno]))
        for path, text, tree in trees()
        for is_code in [code_lines(text, tree)]
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert not {name: count for name, count in functions if count > LINES_OF_A_FUNCTION}


def numbers_before(line: int, tree: ast.Module) -> int:
    """How many numbers stand in the statement or decorator that ends there; 0 if none does."""
    ending = [
        node for node in ast.walk(tree) if getattr(node, "end_lineno", None) == line and not hasattr(node, "body")
    ]
    if not ending:
        return 0
    whole = min(ending, key=lambda node: node.lineno)  # type: ignore[attr-defined]
    constants = (node.value for node in ast.walk(whole) if isinstance(node, ast.Constant))
    return sum(isinstance(value, int | float) and not isinstance(value, bool) for value in constants)


def test_only_tables_of_numbers_keep_a_form_of_their_own():
    """In kernels/ so do a kernel's arguments: pointers, strides, sizes and flags, a row of each."""
    skipped = (
        (f"{path}:{at}", numbers_before(at, tree))
        for path, text, tree in trees()
        for at, line in enumerate(text.splitlines(), 1)
        if line.endswith("# fmt: " + "skip")
    )
    assert not {place: count for place, count in skipped if count < A_TABLE}


def test_numbers_are_those_of_the_statement():
    tree = ast.parse("def f(\n    x,\n):\n    table = [1, 2, 3]\n    return g(x, 4)\n")
    assert [numbers_before(line, tree) for line in (3, 4, 5)] == [0, 3, 1]
