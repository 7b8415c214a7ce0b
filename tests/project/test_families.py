"""A family is one file of plain data, and what follows from it is there: classes, names, what a type checker sees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fastbert
from fastbert.families import _FILES, FAMILIES
from fastbert.families.form import Classifier
from fastbert.models.classes import CLASSES
from fastbert.models.generated import STUB, stub

PACKAGE = Path(fastbert.__file__).parent
LONGEST = 120  # lines of a family's file


@pytest.mark.parametrize("file", _FILES)
def test_a_family_is_a_short_file_of_data(file):
    path = PACKAGE / "families" / f"{file}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Lambda | ast.ClassDef)]


def test_every_file_of_the_folder_is_in_the_list():
    there = {path.stem for path in (PACKAGE / "families").glob("*.py")} - {"__init__", "fields", "form", "spec"}
    assert there == set(_FILES) and list(_FILES) == sorted(_FILES)
    assert len(FAMILIES) == len(_FILES) == len({family.classes for family in FAMILIES.values()})


def test_the_stub_is_what_the_families_say():
    assert STUB.read_text(encoding="utf-8") == stub(), "run: python -m fastbert.models.generated"


def test_every_class_is_a_public_name():
    names = [kind.__name__ for kind in CLASSES.values()]
    assert len(names) == len(set(names))
    everything: dict = {}
    exec("from fastbert import *", everything)
    for kind in CLASSES.values():
        assert everything[kind.__name__] is getattr(fastbert, kind.__name__) is kind
    assert set(fastbert.__all__) <= everything.keys() and dir(fastbert) == sorted(fastbert.__all__)
    assert set(names) < set(fastbert.__all__) and len(fastbert.__all__) == len(set(fastbert.__all__))


def test_classes_are_those_of_the_data():
    for model_type, family in FAMILIES.items():
        heads = {head for kind, head in CLASSES if kind == model_type}
        assert heads == {"Model", *family.heads}
        for head, kind in ((head, CLASSES[model_type, head]) for head in heads):
            assert kind.family is family and kind.__name__.startswith(family.classes)
            assert isinstance(family.heads.get(head), Classifier) == hasattr(kind, "scores")


def test_no_family_is_named_outside_of_the_families():
    """What depends on the family is in its data: nothing else compares a model_type with a name of one. Only bench
    does: which peers can do what is nobody's data here.
    """
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name in ("families", "bench"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                literals = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                assert not set(map(str, literals)) & FAMILIES.keys(), f"{path}: line {node.lineno} asks for a family"
