"""Who may import whom: the map of docs/design.md, and no circle."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "fastbert"

# Which room, or file beside the rooms, may import which of the others, or which files of them (docs/design.md). What no
# row names fails.
FORMS = {"families.schema", "families.fields"}  # that a family's data fill in
LEAVES = {
    "errors",
    "files",
    "hub",
    "importing",
    "layer_spec",
    "messages",
    "version",
}  # which all of them may import
MAY_IMPORT = {
    **{leaf: set() for leaf in LEAVES},
    "__init__": {"families", "models"},
    "__main__": {"cli"},
    "families": set(),
    "config": {"families"},
    "native": {"_C"},
    "backend": {"native"},
    "backend_report": {"backend", "ops"},
    "ops": {"_C", "backend", "native"},  # kernels and _C inside of functions only: see below
    "kernels": set(),
    "packing": {"ops"},
    "packed_inputs": {"packing"},
    "layers": {"native", "ops", *FORMS},
    "checkpoint": {"config", "families", "native"},
    "execution": {"config", "families", "layers", "ops", "packed_inputs", "packing"},
    "models": {"checkpoint", "config", "execution", "families", "layers", "native", "ops", "packed_inputs", "packing"},
    "quantization": {"layers", "models"},
    "inspect": {"data", "execution", "layers", "models", "packed_inputs"},
    "packed_weights": {"layers", "models", "native", "ops"},
    "master_weights": set(),
    "acceleration": {"config", "execution", "families", "layers", "models", "ops", "packed_inputs", "packing"},
    "data": {"checkpoint", "config", "families", "ops", "packed_inputs", "packing"},
    "sentences": {"checkpoint", "data", "layers", "models", "native", "ops", "packed_inputs"},
    "training": {
        "backend",
        "checkpoint",
        "config",
        "data",
        "families",
        "layers",
        "models",
        "native",
        "ops",
        "packed_inputs",
        "packing",
        "sentences",
    },
    "serve": {"checkpoint", "data", "native", "packed_weights", "sentences"},
    "bulk": {"native", "sentences"},
    "testing": set(),
    "bench": {
        "acceleration",
        "backend",
        "config",
        "data",
        "models",
        "packed_inputs",
        "quantization",
        "sentences",
        "testing",
    },
    "cli": {
        "_C",
        "backend",
        "backend_report",
        "bench",
        "bulk",
        "checkpoint",
        "config",
        "data",
        "inspect",
        "layers",
        "models",
        "native",
        "ops",
        "packed_inputs",
        "packed_weights",
        "quantization",
        "sentences",
        "serve",
        "testing",
        "training",
    },
}
# What modules import for a type checker alone, against the arrows of the map.
FOR_TYPES = {("checkpoint", "models"), ("layers", "packing")}
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


class Import(NamedTuple):
    """Of a module of ours where `name` is one, else of what it has."""

    module: str
    name: str
    at_import: bool  # and not inside of a function
    for_types: bool  # under TYPE_CHECKING


@functools.cache
def imports_of(path: Path) -> list[Import]:
    found = []

    def visit(node: ast.AST, at_import: bool, for_types: bool) -> None:
        for child in ast.iter_child_nodes(node):
            types = for_types or (isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING")
            if isinstance(child, ast.Import):
                found.extend(Import(alias.name, "", at_import, types) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    is_module = full in MODULES or full in ("fastbert._C", "fastbert.kernels")
                    module = full if is_module else child.module or "."
                    found.append(Import(module, "" if is_module else alias.name, at_import, types))
            visit(child, at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef), types)

    visit(ast.parse(path.read_text(encoding="utf-8")), True, False)
    return found


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    own = room_of(module)
    assert own in MAY_IMPORT, f"the map of imports does not name {own}"
    for found in imports_of(MODULES[module]):
        root, target = found.module.split(".")[0], room_of(found.module)
        if root in ("transformers", "sentence_transformers", "peft", "triton"):
            assert not found.at_import or found.for_types, f"{module} imports {root} when it is imported"
        if root != "fastbert" or target == own:
            continue
        if target in ("_C", "kernels") and own in ("ops", "native"):
            assert not found.at_import, f"{module} imports {found.module} when it is imported"
            continue
        assert target != "__init__", f"{module} imports {found.name or 'it'} from the package's own __init__"
        part = ".".join(found.module.split(".")[1:3])
        allowed = (LEAVES | MAY_IMPORT[own]) & {target, part} or (found.for_types and (own, target) in FOR_TYPES)
        assert allowed or own == "__init__", f"{module} imports {found.module}"


def circle_of(graph: dict[str, set[str]]) -> list[str]:
    """A way along the graph that comes back to where it began; empty: there is none."""
    is_clear: set[str] = set()

    def follow(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in is_clear:
            return []
        for after in sorted(graph.get(node, ())):
            if circle := follow(after, [*way, node]):
                return circle
        is_clear.add(node)
        return []

    return next(filter(None, (follow(node, []) for node in sorted(graph))), [])


def test_no_circle():
    """Of modules, imports inside of functions too, and of rooms."""
    assert circle_of({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    modules = {
        name: {i.module for i in imports_of(path) if i.module in MODULES and i.module != name and not i.for_types}
        for name, path in MODULES.items()
    }
    assert sum(map(len, modules.values())) > 500 and circle_of(modules) == []
    assert circle_of({room: {may.split(".")[0] for may in allowed} for room, allowed in MAY_IMPORT.items()}) == []


def test_no_circle_in_cpp():
    """Of headers with the files that define what they declare."""
    csrc = PACKAGE.parent / "csrc"
    units: dict[str, set[str]] = {}
    for path in sorted(csrc.rglob("*")):
        if path.suffix in (".h", ".cpp", ".cu"):
            own = str(path.relative_to(csrc).with_suffix(""))
            for name in re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
                found = (path.parent / name).resolve()
                if found.is_relative_to(csrc):
                    units.setdefault(own, set()).add(str(found.relative_to(csrc).with_suffix("")))
    assert sum(map(len, units.values())) > 300
    assert circle_of({unit: others - {unit} for unit, others in units.items()}) == []


def test_the_map_names_nothing_that_is_gone():
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert set(MAY_IMPORT) == there


def test_the_design_page_has_this_map():
    page = (PACKAGE.parent / "docs" / "design.md").read_text(encoding="utf-8").replace("\\_", "_")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    table = {room: set(may.split(", ")) - {"-"} for room, _, may in rows}
    assert table == MAY_IMPORT


def test_the_picture_has_each_room_above_what_it_imports():
    page = (PACKAGE.parent / "docs" / "design.md").read_text(encoding="utf-8")
    level = {}
    for number, rooms in re.findall(r"^    (\d)  (.+)$", page, re.MULTILINE):
        level |= dict.fromkeys(re.sub(r"and the leaves:", "", rooms).split(), int(number))
    assert level.keys() == MAY_IMPORT.keys() - {"__init__", "__main__"}
    for room in level:
        below = {may.split(".")[0] for may in MAY_IMPORT[room]} - {"_C"}
        assert level[room] == max((level[each] + 1 for each in below), default=0), room


def test_no_room_is_crowded():
    """families/ and tests/ may be: they have a file for each thing of one kind."""
    for folder in (PACKAGE, *(p for p in PACKAGE.rglob("*") if p.is_dir()), *PACKAGE.parent.glob("benchmarks/**/")):
        assert folder.name == "families" or len(list(folder.glob("*.py"))) <= 15, folder


def test_the_oracle_imports_torch_only():
    roots = {found.module.split(".")[0] for found in imports_of(PACKAGE / "testing" / "reference.py")}
    assert roots <= {"__future__", "math", "itertools", "torch"}


def test_a_family_imports_the_form_only():
    """Its file is plain data: besides the form, the standard library."""
    folder = PACKAGE / "families"
    for path in sorted(folder.glob("*.py")):
        for found in imports_of(path):
            is_standard = found.module.split(".")[0] in sys.stdlib_module_names
            shared = ("families.rope", "families.disentangled", "families.llama", "families.vocabulary", "layer_spec")
            is_form = found.module in {f"fastbert.{form}" for form in (*FORMS, *shared)}
            assert is_standard or is_form, f"{path} imports {found.module}"


def test_kernels_import_torch_triton_and_siblings_only():
    for path in sorted((PACKAGE.parent / "kernels").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert all(a.name.split(".")[0] in ("torch", "triton", "math", "os") for a in node.names), path
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert (node.module or "").split(".")[0] in ("__future__", "torch", "triton"), path


def test_c_kernels_know_no_tensors():
    csrc = PACKAGE.parent / "csrc"
    for folder in ("cpu", "include"):
        for path in sorted((csrc / folder).glob("*")):
            text = path.read_text()
            assert "torch/" not in text and "ATen/" not in text, f"{path} includes torch"
