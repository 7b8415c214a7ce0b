"""Every text that a user can meet at run time: errors, warnings, lines on stderr, reasons, and the command line's help.

`python tests/support/messages.py [FILE ...]` prints those of all files below fastbert, or of the files, one a line: the
line in the file, the kind (an error's or a warning's class, `say`, `reason`, `help`), and the text, with the fields of
an f-string in braces.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fastbert"
LOGGED = ("debug", "info", "warning", "error", "exception", "critical")  # a logger's methods
SAID = ("say", "refuse", "error", "_refuse")  # functions of ours that print or raise the text that they get
HELP = ("help", "description", "epilog", "title", "summary", "usage")  # keywords of argparse's functions, and of ours


class Message(NamedTuple):
    """A text that is shown to a user, and where it stands."""

    file: str
    line: int
    kind: str
    text: str


class _Finder(ast.NodeVisitor):
    """Finds the messages of a file. What a name was set to, in the function around it or the file, stands for it."""

    def __init__(self, file: str, tree: ast.Module):
        self.file, self.found = file, list[Message]()
        self.names = [_set_in(tree.body)]
        self.gives_reason = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before, self.gives_reason = self.gives_reason, _is_optional_text(node.returns)
        self.names.append(self.names[0] | _set_in(ast.walk(node)))
        self.generic_visit(node)
        self.names.pop()
        self.gives_reason = before

    def visit_Raise(self, node: ast.Raise) -> None:
        if isinstance(node.exc, ast.Call):
            self._add(node.exc, _name(node.exc.func), node.exc.args)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if self.gives_reason and node.value is not None:
            self._add(node, "reason", [node.value])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name.endswith(("Error", "Warning", "Refused", "Unavailable")):
            self._add(node, name, node.args)
        elif name == "warn":
            kinds = [_name(argument) for argument in node.args[1:2]]
            self._add(node, kinds[0] if kinds else "UserWarning", node.args[:1])
        elif name in LOGGED and "log" in _name(getattr(node.func, "value", None)):
            self._add(node, f"logger.{name}", node.args[:1])
        elif name in SAID or (name == "print" and self.file.startswith("fastbert/cli")):
            self._add(node, name, node.args)
        elif name == "add_command":
            self._add(node, "help", node.args[3:])
        elif name in ("option", "_option", "field") or name.startswith("add_"):
            self._add(node, "help", [argument for argument in node.args if _is_prose(argument)])
        for keyword in node.keywords:
            if keyword.arg in HELP:
                self._add(keyword.value, "help", [keyword.value])
        self.generic_visit(node)

    def _add(self, node: ast.AST, kind: str, arguments: list[ast.expr]) -> None:
        texts = [" ".join(self._text(argument).split()) for argument in arguments]
        if any(" " in text or "{" not in text for text in texts if text):
            self.found.append(Message(self.file, getattr(node, "lineno", 0), kind, " | ".join(filter(None, texts))))

    def _text(self, node: ast.expr, depth: int = 0) -> str:
        """A string as it is written; "" for what is not a string and has no name."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else ""
        if isinstance(node, ast.JoinedStr):
            return "".join(
                self._field(part) if isinstance(part, ast.FormattedValue) else self._text(part) for part in node.values
            )
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return (self._text(node.left) or _braced(node.left)) + (self._text(node.right) or _braced(node.right))
        if isinstance(node, ast.IfExp):
            return " / ".join(filter(None, (self._text(each, depth) for each in (node.body, node.orelse))))
        if isinstance(node, ast.Name) and depth < 2 and node.id in self.names[-1]:
            return " / ".join(filter(None, (self._text(value, depth + 1) for value in self.names[-1][node.id])))
        return ""

    def _field(self, node: ast.FormattedValue) -> str:
        spec = f":{self._text(node.format_spec)}" if node.format_spec is not None else ""
        return f"{{{ast.unparse(node.value)}{'' if node.conversion == -1 else '!' + chr(node.conversion)}{spec}}}"


def _set_in(nodes: Iterable[ast.AST]) -> dict[str, list[ast.expr]]:
    """What each name is set to."""
    names: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.NamedExpr):
            names.setdefault(node.target.id, []).append(node.value)
    return names


def _braced(node: ast.expr) -> str:
    return f"{{{ast.unparse(node)}}}"


def _name(node: ast.AST | None) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_prose(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and " " in str(node.value))


def _is_optional_text(node: ast.expr | None) -> bool:
    """Of functions that say why something is not so, or None."""
    return node is not None and ast.unparse(node) in ("str | None", "Optional[str]", "Reason", "Reason | None")


def messages(path: Path) -> Iterator[Message]:
    """Those of a file, in its order; each once."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    finder = _Finder(str(path.resolve().relative_to(ROOT)), tree)
    finder.visit(tree)
    yield from sorted(set(finder.found), key=lambda message: message.line)


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or sorted(PACKAGE.rglob("*.py")):
        if found := list(messages(path)):
            sys.stdout.write(f"{found[0].file}\n")
            sys.stdout.writelines(f"  {each.line:>5}  {each.kind}: {each.text}\n" for each in found)
