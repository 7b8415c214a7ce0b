"""Files that are laid out otherwise than the tree: what a family's `files` say, applied both ways."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from fastbert.families.form import Family, Rename, Split

Weights = dict[str, torch.Tensor]


def _replaced(key: str, old: str, new: str) -> str | None:
    """`key` with the names `old` ("attn.out_proj") replaced where it first has them, whole between dots; else None."""
    found = re.search(rf"(?:^|(?<=\.)){re.escape(old)}(?=\.)", key)
    return None if found is None else (key[: found.start()] + new + key[found.end() :]).lstrip(".")


def to_tree(weights: Mapping[str, torch.Tensor], family: Family) -> Weights:
    """The tensors of a file under the names of the tree. What is there already stays as it is."""
    made = dict(weights)
    for rule in family.files:
        before, made = made, {}
        for key, t in before.items():
            if isinstance(rule, Rename):
                made[_replaced(key, rule.old, rule.new) or key] = t
                continue
            names = [_replaced(key, rule.old, new) for new in rule.new]
            parts = t.chunk(len(names)) if names[0] is not None and t.shape[0] % len(names) == 0 else ()
            made |= {name: part for name, part in zip(names, parts, strict=True) if name} if parts else {key: t}
    return made


def to_file(weights: Mapping[str, torch.Tensor], family: Family) -> Weights:
    """The tensors of a tree under the names, and in the pieces, that the family's files have."""
    made = dict(weights)
    for rule in reversed(family.files):
        before, made = made, {}
        for key, t in before.items():
            if isinstance(rule, Rename):
                made[(_replaced(key, rule.new, rule.old) if rule.new and rule.is_written else None) or key] = t
            elif (whole := _merged(key, rule, before)) is not None:
                made[whole[0]] = whole[1]
            elif not any(_replaced(key, new, rule.old) for new in rule.new[1:]):
                made[key] = t
    return made


def _merged(key: str, rule: Split, weights: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor] | None:
    """The name and the tensor of the whole whose first part is at `key`; None where there is none."""
    name = _replaced(key, rule.new[0], rule.old)
    if name is None:
        return None
    parts: Sequence[torch.Tensor] = [weights[str(_replaced(key, rule.new[0], new))] for new in rule.new]
    return name, torch.cat(list(parts))
