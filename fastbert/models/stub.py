"""Writes classes.pyi: what a type checker and an IDE see of the classes that classes.py makes from the families."""

from __future__ import annotations

from pathlib import Path

from fastbert.families import FAMILIES
from fastbert.models.classes import head_class

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
    modules = sorted({module for module, _ in kinds})
    lines = ["# Written by `python -m fastbert.models.stub` from the families; a test compares.", ""]
    lines += [
        "from fastbert.families.form import Head",
        "from fastbert.models.base import EncoderModel, PreTrainedModel",
    ]
    for module in modules:
        names = ", ".join(sorted(name for other, name in kinds if other == module))
        line = f"from {module} import {names}"
        lines.append(
            line if len(line) <= 120 else f"from {module} import (\n    " + names.replace(", ", ",\n    ") + ",\n)"
        )
    lines += ["from fastbert.models.heads import HeadModel", ""]
    lines += ["CLASSES: dict[tuple[str, str], type[PreTrainedModel]]", ""]
    lines += ["def head_class(name: str, head: Head) -> type[HeadModel]: ...", ""]
    return "\n".join([*lines, *body, ""])


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
