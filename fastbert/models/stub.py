"""Writes classes.pyi: what a type checker and an IDE see of the classes that classes.py makes from the families."""

from __future__ import annotations

from pathlib import Path

from fastbert.families import FAMILIES
from fastbert.models.classes import head_class
from fastbert.models.heads import HeadModel

STUB = Path(__file__).with_name("classes.pyi")


def stub() -> str:
    """The text of the file."""
    kinds, body = set(), []
    for family in FAMILIES.values():
        body.append(f"class {family.classes}Model(EncoderModel): ...")
        for name, head in family.heads.items():
            kind = head_class(name, head)
            kinds.add((kind.__module__, kind.__name__))
            body.append(f"class {family.classes}For{name}({kind.__name__}): ...")
    kinds.add((HeadModel.__module__, HeadModel.__name__))
    lines = ["# Written by `python -m fastbert.models.stub` from the families; a test compares.", ""]
    lines.append("from fastbert.families.form import Head")
    lines.append("from fastbert.models.base import EncoderModel, PreTrainedModel")
    for module in sorted({module for module, _ in kinds}):
        names = sorted(name for other, name in kinds if other == module)
        line = f"from {module} import {', '.join(names)}"
        lines += [line] if len(line) <= 120 else [f"from {module} import (", *(f"    {name}," for name in names), ")"]
    lines.append("")
    lines += ["CLASSES: dict[tuple[str, str], type[PreTrainedModel]]", ""]
    lines += ["def head_class(name: str, head: Head) -> type[HeadModel]: ...", ""]
    return "\n".join([*lines, *body, ""])


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
