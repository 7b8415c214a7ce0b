"""Files that are laid out otherwise than the tree: what a family's `files` say, applied both ways."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from fastbert.config import EncoderConfig
from fastbert.errors import CheckpointError
from fastbert.families.schema import Rename, Split

Weights = dict[str, torch.Tensor]


def _replaced(key: str, old: str, new: str) -> str | None:
    """`key` with the names `old` ("attn.out_proj") replaced where it first has them, whole between dots; else None."""
    match = re.search(rf"(?:^|(?<=\.)){re.escape(old)}(?=\.)", key)
    return None if match is None else (key[: match.start()] + new + key[match.end() :]).lstrip(".")


def to_tree(weights: Mapping[str, torch.Tensor], config: EncoderConfig) -> Weights:
    """The tensors of a file under the names of the tree. What is there already stays as it is.

    Raises CheckpointError: a tensor that holds several has another number of rows, or there are some of these only.
    """
    tensors, files = dict(weights), config.family.files
    for rule in files:
        before, tensors = tensors, {}
        for key, t in before.items():
            if isinstance(rule, Rename):
                tensors[_replaced(key, rule.old, rule.new) or key] = t
                continue
            names = [name for new in rule.new if (name := _replaced(key, rule.old, new)) is not None]
            if not names:
                tensors[key] = t
                continue
            shares = rule.shares_of(config)
            if not t.dim() or t.shape[0] % sum(shares):
                parts = f"{len(names)} equal parts" if rule.shares is None else f"parts of {_as_ratio(shares)}"
                raise CheckpointError(f"{key} has shape {tuple(t.shape)}; its rows must divide into {parts}: {names}")
            unit = t.shape[0] // sum(shares)
            tensors |= dict(zip(names, t.split([unit * share for share in shares]), strict=True))
    for rule in files:
        if isinstance(rule, Split):
            _check_parts(tensors, rule)
    return tensors


def to_file(weights: Mapping[str, torch.Tensor], config: EncoderConfig) -> Weights:
    """The tensors of a tree under the names, and in the pieces, that the family's files have.

    Raises CheckpointError: of tensors that one of the file's holds, some are missing, or of another width or dtype.
    """
    tensors = dict(weights)
    for rule in reversed(config.family.files):
        if isinstance(rule, Split):
            _check_parts(tensors, rule)
        before, tensors = tensors, {}
        for key, t in before.items():
            if isinstance(rule, Rename):
                tensors[(_replaced(key, rule.new, rule.old) if rule.new and rule.is_written else None) or key] = t
                continue
            whole = _replaced(key, rule.new[0], rule.old)
            if whole is not None:
                tensors[whole] = _merged([before[part] for part in _parts(key, rule)], whole, rule.shares_of(config))
            elif not _parts(key, rule):
                tensors[key] = t
    return tensors


def _merged(parts: list[torch.Tensor], name: str, shares: tuple[int, ...]) -> torch.Tensor:
    """The parts as one. Their rows must be as `shares` say, or a reader would cut elsewhere."""
    row_types = {(*part.shape[1:], part.dtype) for part in parts}
    rows = [part.shape[0] if part.dim() else 0 for part in parts]
    if len(row_types) > 1 or any(n * shares[0] != rows[0] * share for n, share in zip(rows, shares, strict=True)):
        kinds = sorted({f"{tuple(part.shape)} {part.dtype}" for part in parts})
        wanted = (
            "shapes and dtypes that are alike" if len(set(shares)) == 1 else f"rows in the ratio {_as_ratio(shares)}"
        )
        raise CheckpointError(f"{name} is one tensor in files, so its parts must have {wanted}; they are {kinds}")
    return torch.cat(parts)


def _as_ratio(shares: tuple[int, ...]) -> str:
    return " to ".join(map(str, shares))


def _parts(key: str, rule: Split) -> list[str]:
    """The names of all leaves that one tensor of a file holds, where `key` is one of them."""
    for new in rule.new:
        if _replaced(key, new, rule.old) is not None:
            return [str(_replaced(key, new, other)) for other in rule.new]
    return []


def _check_parts(weights: Weights, rule: Split) -> None:
    for key in weights:
        if absent := [part for part in _parts(key, rule) if part not in weights]:
            raise CheckpointError(
                f"{key} is there, but not {', '.join(absent)}: files have them as one tensor, {rule.old}"
            )
