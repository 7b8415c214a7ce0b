"""A family is one file of plain data, and what follows from it is there: classes, names, what a type checker sees."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from lines_of_code import lines_of

import fastbert
from fastbert.families import _FILES, FAMILIES
from fastbert.families.schema import ClassifierHead
from fastbert.models.classes import CLASSES
from fastbert.models.generated import STUB, WRITTEN, stub, tables, write

PACKAGE = Path(fastbert.__file__).parent
LONGEST = 120  # lines of code of a family's file


@pytest.mark.parametrize("file", _FILES)
def test_a_family_is_a_short_file_of_data(file):
    text = (PACKAGE / "families" / f"{file}.py").read_text(encoding="utf-8")
    assert lines_of(text) <= LONGEST
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Lambda | ast.ClassDef)]


def test_every_file_of_the_folder_is_in_the_list():
    shared = {"__init__", "fields", "schema", "rope", "disentangled", "llama", "vocabulary"}
    there = {path.stem for path in (PACKAGE / "families").glob("*.py")} - shared
    assert there == set(_FILES) and list(_FILES) == sorted(_FILES)
    assert len(FAMILIES) == len(_FILES) == len({family.classes for family in FAMILIES.values()})


def test_the_stub_is_what_the_families_say():
    assert STUB.read_text(encoding="utf-8") == stub(), "run: python -m fastbert.models.generated"


@pytest.mark.parametrize(("activation", "words"), (("relu", "ReGLU"), ("tanh", "gated tanh"), ("gelu_new", "GeGLU")))
def test_gated_layers_of_any_activation(activation, words, monkeypatch):
    """In words, in the table of families, whose default has it."""
    family = FAMILIES["gte"]
    changed = replace(family, defaults={**family.defaults, "hidden_act": activation})
    monkeypatch.setitem(FAMILIES, "gte", changed)
    row = next(line for line in tables().splitlines() if "`gte`" in line)
    assert f", {words}" in row


def pages(root: Path) -> dict[Path, str]:
    """Files as `write` takes them, below `root`, with old text between the markers."""
    made = {root / "classes.pyi": "old\n"}
    for page in WRITTEN:
        made[root / page] = "before\n<!-- families: made by a program -->\nold\n<!-- end of families -->\nbehind\n"
    for path, text in made.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return made


def test_what_is_generated_is_written_whole_or_not_at_all(monkeypatch, tmp_path):
    before, stub_file = pages(tmp_path), tmp_path / "classes.pyi"

    def now() -> dict[Path, str]:
        return {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file()}

    def fails():
        raise KeyError("a family")

    with monkeypatch.context() as patch:
        patch.setitem(WRITTEN, list(WRITTEN)[-1], fails)
        with pytest.raises(KeyError, match="a family"):
            write(tmp_path, stub_file)
    assert now() == before
    last = tmp_path / list(WRITTEN)[-1]
    last.write_text("no markers\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="has 0 sections of families, not 1"):
        write(tmp_path, stub_file)
    assert now() == {**before, last: "no markers\n"}
    pages(tmp_path)
    write(tmp_path, stub_file)
    after = now()
    assert after.keys() == before.keys() and after[stub_file] == stub()
    for page, text in WRITTEN.items():
        assert f"-->\n{text()}\n<!-- end of families -->\nbehind\n" in after[tmp_path / page]


def test_every_class_is_a_public_name():
    names = [kind.__name__ for kind in CLASSES.values()]
    assert len(names) == len(set(names))
    everything: dict = {}
    exec("from fastbert import *", everything)
    for kind in CLASSES.values():
        assert everything[kind.__name__] is getattr(fastbert, kind.__name__) is kind
    assert set(names) <= vars(fastbert).keys()  # looked up once: each import counts what others froze (importing/)
    assert set(fastbert.__all__) <= everything.keys() and dir(fastbert) == sorted(fastbert.__all__)
    assert set(names) < set(fastbert.__all__) and len(fastbert.__all__) == len(set(fastbert.__all__))


def test_classes_are_those_of_the_data():
    for model_type, family in FAMILIES.items():
        heads = {head for kind, head in CLASSES if kind == model_type}
        assert heads == {"Model", *family.heads}
        for head, kind in ((head, CLASSES[model_type, head]) for head in heads):
            assert kind.family is family and kind.__name__.startswith(family.classes)
            assert isinstance(family.heads.get(head), ClassifierHead) == hasattr(kind, "scores")


def test_no_family_is_named_outside_of_the_families():
    """What depends on the family is in its data: nothing else compares a model_type with a name of one. Only bench
    does: which peers can do what is not among our data.
    """
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name in ("families", "bench"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                literals = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                assert not set(map(str, literals)) & FAMILIES.keys(), f"{path}: line {node.lineno} asks for a family"
