"""python tests/support/rename.py TABLE: gives things new names, everywhere at once. renames.txt has them.

A line of the table is an old name, a new one, and where it holds: files (globs from the top; none: all), or
`file.py::function` or `file.py::Class.method` for a variable of that function. A line whose names have a slash moves a
file. In Python, identifiers change, also within f-strings, and paths of modules within
strings. In comments, docstrings, documents and C++ a name changes that no sentence has (with an underscore or a
capital), and any other one between backticks. The patches of tests/faults are made anew: of the renamed file, and of
the renamed file with the fault.
"""

from __future__ import annotations

import ast
import difflib
import io
import re
import subprocess
import sys
import tempfile
import tokenize
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
HEAD = re.compile(r"^diff --git ", re.MULTILINE)


class Name(NamedTuple):
    old: str
    new: str
    files: tuple[str, ...]
    function: str = ""  # of which it is a variable

    @property
    def is_a_word(self) -> bool:
        """Sentences may have it."""
        return re.fullmatch("[a-z]+", self.old) is not None


def in_code(text: str, names: list[Name]) -> str:
    for name in names:
        text = re.sub(rf"{'(?<![.])' if name.function else ''}\b{re.escape(name.old)}\b", name.new, text)
    return text


def in_prose(text: str, names: list[Name]) -> str:
    text = in_code(text, [name for name in names if not name.is_a_word])
    return re.sub(r"`[^`\n]+`", lambda found: in_code(found[0], names), text)


def in_string(token: str, names: list[Name]) -> str:
    if re.match("[a-zA-Z]*[fF]", token):
        return re.sub(r"\{[^{}]*\}", lambda found: in_code(found[0], names), in_prose(token, names))
    is_path = re.fullmatch(r"\"[\w./]+[./][\w./]+\"", token) is not None
    return in_code(token, names) if is_path else in_prose(token, names)


class Function(NamedTuple):
    """Of a file: where it is, in lines, and what variables cannot be."""

    first: int
    last: int
    name: str


def functions_of(tree: ast.AST, inside: str = "") -> list[Function]:
    """Functions and classes, each before what is inside of it."""
    found = []
    for node in ast.iter_child_nodes(tree):
        name = inside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}.{node.name}".removeprefix(".")
            found.append(Function(node.lineno, node.end_lineno or node.lineno, name))
        found += functions_of(node, name)
    return found


def holds_at(name: Name, row: int, functions: list[Function]) -> bool:
    return not name.function or any(each.first <= row <= each.last for each in functions if each.name == name.function)


def in_python(source: str, names: list[Name]) -> str:
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    functions = functions_of(tree)
    for name in names:
        if name.function and name.function not in {each.name for each in functions}:
            raise ValueError(f"there is no {name.function}, of which {name.old} is to be renamed")
    # Whose parameters these are, the call does not tell: a variable's new name leaves them alone, and attributes.
    keywords = {(node.lineno, node.col_offset) for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    made, at, before = [], 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        begin, end = (starts[row - 1] + column for row, column in (token.start, token.end))
        here = [name for name in names if holds_at(name, token.start[0], functions)]
        text = token.string
        if token.type == tokenize.NAME:
            row, column = token.start
            bound = before == "." or (row, len(lines[row - 1][:column].encode())) in keywords
            text = next((name.new for name in here if name.old == text and not (name.function and bound)), text)
        elif token.type == tokenize.STRING:
            text = in_string(text, here)
        elif token.type == tokenize.COMMENT:
            text = in_prose(text, here)
        before = token.string
        if text != token.string:
            made += [source[at:begin], text]
            at = end
    return "".join([*made, source[at:]])


def renamed(path: str, text: str, names: list[Name]) -> str:
    names = [name for name in names if not name.files or any(fnmatch(path, one) for one in name.files)]
    return in_python(text, names) if path.endswith((".py", ".pyi")) else in_prose(text, names)


def with_fault(patch: str, path: str) -> str:
    """The file as the patch makes it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path)
        copy.parent.mkdir(parents=True)
        copy.write_text((ROOT / path).read_text())
        command = ["git", "apply", "--include", path, str(ROOT / patch)]
        subprocess.run(command, cwd=folder, env={"GIT_CEILING_DIRECTORIES": folder}, check=True)
        return copy.read_text()


def main() -> None:
    rows = [line.split() for line in Path(sys.argv[1]).read_text().splitlines() if line and not line.startswith("#")]
    names = []
    for old, new, *where in rows:
        if "/" not in old:
            names += [Name(old, new, (each.split("::")[0],), each.split("::")[1]) for each in where if "::" in each]
            files = tuple(each for each in where if "::" not in each)
            names += [Name(old, new, files)] if files or not where else []
    moves = {row[0]: row[1] for row in rows if "/" in row[0]}
    names.sort(key=lambda name: not name.function)  # a variable's name goes before one that holds in all of a file
    names += [Name(old.removeprefix("fastbert/"), new.removeprefix("fastbert/"), ()) for old, new in moves.items()]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kinds = (".py", ".pyi", ".md", ".h", ".cpp", ".cu", ".toml", ".yml", ".patch", "Makefile")
    kept = {"tests/support/rename.py"}  # its own words are those of all tables
    files = {path: (ROOT / path).read_text() for path in listed if path.endswith(kinds) and path not in kept}
    made = {path: renamed(path, text, names) for path, text in files.items() if not path.endswith(".patch")}
    for patch, text in files.items():
        patched = re.findall(r"^\+\+\+ b/(.+)$", text, re.MULTILINE) if patch.endswith(".patch") else []
        changed = any(made[path] != files[path] or path in moves for path in patched)
        if changed or (patched and in_prose(text, names) != text):
            parts = [text[: HEAD.search(text).start()]]  # type: ignore[union-attr]
            for path in patched:
                new, bad = moves.get(path, path), renamed(path, with_fault(patch, path), names)
                sides = (made[path].splitlines(keepends=True), bad.splitlines(keepends=True))
                parts += [f"diff --git a/{new} b/{new}\n", *difflib.unified_diff(*sides, f"a/{new}", f"b/{new}")]
            made[patch] = in_prose(parts[0], names) + "".join(parts[1:])
    for path, text in made.items():
        if text != files[path]:
            (ROOT / path).write_text(text)
    for old, new in moves.items():
        (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", old, new], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
