"""Files that are laid out otherwise than the tree: what a family's `files` say, applied both ways."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from fastbert.checkpoint.weight_files import CheckpointError
from fastbert.families.form import Family, Rename, Split

Weights = dict[str, torch.Tensor]


def _replaced(key: str, old: str, new: str) -> str | None:
    """`key` with the names `old` ("attn.out_proj") replaced where it first has them, whole between dots; else None."""
    found = re.search(rf"(?:^|(?<=\.)){re.escape(old)}(?=\.)", key)
    return None if found is None else (key[: found.start()] + new + key[found.end() :]).lstrip(".")


def to_tree(weights: Mapping[str, torch.Tensor], family: Family) -> Weights:
    """The tensors of a file under the names of the tree. What is there already stays as it is.

    Raises CheckpointError: a tensor that holds several has another number of rows, or there are some of these only.
    """
    made = dict(weights)
    for rule in family.files:
        before, made = made, {}
        for key, t in before.items():
            if isinstance(rule, Rename):
                made[_replaced(key, rule.old, rule.new) or key] = t
                continue
            names = [name for new in rule.new if (name := _replaced(key, rule.old, new)) is not None]
            if names and (not t.dim() or t.shape[0] % len(names)):
                shape = tuple(t.shape)
                raise CheckpointError(f"{key} has shape {shape}; its rows are to be {len(names)} equal parts: {names}")
            made |= dict(zip(names, t.chunk(len(names)), strict=True)) if names else {key: t}
    for rule in family.files:
        if isinstance(rule, Split):
            _check_parts(made, rule)
    return made


def to_file(weights: Mapping[str, torch.Tensor], family: Family) -> Weights:
    """The tensors of a tree under the names, and in the pieces, that the family's files have.

    Raises CheckpointError: of tensors that one of the file's holds, some are missing, or of another width or dtype.
    """
    made = dict(weights)
    for rule in reversed(family.files):
        if isinstance(rule, Split):
            _check_parts(made, rule)
        before, made = made, {}
        for key, t in before.items():
            if isinstance(rule, Rename):
                made[(_replaced(key, rule.new, rule.old) if rule.new and rule.is_written else None) or key] = t
                continue
            whole = _replaced(key, rule.new[0], rule.old)
            if whole is not None:
                made[whole] = _merged([before[part] for part in _parts(key, rule)], whole)
            elif not _parts(key, rule):
                made[key] = t
    return made


def _merged(parts: list[torch.Tensor], name: str) -> torch.Tensor:
    kinds = {f"{tuple(part.shape)} {part.dtype}" for part in parts}
    if len(kinds) > 1:
        raise CheckpointError(
            f"{name} is one tensor in files, and what it is made of has not one form: {sorted(kinds)}"
        )
    return torch.cat(parts)


def _parts(key: str, rule: Split) -> list[str]:
    """The names of all leaves that one tensor of a file holds, where `key` is one of them."""
    for new in rule.new:
        if _replaced(key, new, rule.old) is not None:
            return [str(_replaced(key, new, other)) for other in rule.new]
    return []


def _check_parts(weights: Weights, rule: Split) -> None:
    for key in weights:
        if absent := [part for part in _parts(key, rule) if part not in weights]:
            raise CheckpointError(f"{key} is there, but not {', '.join(absent)}: files have them as one, {rule.old}")
