"""The forms in which `pack_inputs` takes a batch: one tensor, or a list of sequences, which may be choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastbert.errors import InputError


def is_array(values: Any) -> bool:
    """A tensor or a NumPy array, whose rows are of one length."""
    return hasattr(values, "shape") and hasattr(values, "dtype")


def _is_many(values: Any) -> bool:
    return len(values.shape) > 0 if is_array(values) else isinstance(values, Sequence)


def is_integer(t: torch.Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)


def tensor(name: str, values: Any) -> torch.Tensor:
    """Raises InputError for what makes none, or is on a device."""
    try:
        t = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"{name} makes no tensor: {error}") from None
    if not t.is_cpu:
        raise InputError(f"{name} is on {t.device}; pack_inputs works on the host: move what it returns")
    return t


def integers(name: str, values: Any) -> torch.Tensor:
    t = tensor(name, values)
    if t.numel() and not is_integer(t):
        raise InputError(f"{name} is {t.dtype}; it must hold integers")
    return t.long()


def _rows(name: str, values: Any) -> Sequence[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InputError(f"{name} is a {type(values).__name__}; it must be a list of sequences, as input_ids is")
    return values


def without_choices(values: Any, num_choices: int | None = None, name: str = "input_ids") -> tuple[Any, int | None]:
    """The choices of all examples one after the other, and how many an example has; None where there are none.

    `num_choices`: of the input_ids, where `values` are other fields of them.
    """
    if is_array(values):
        t = tensor(name, values)
        if t.dim() != 3:
            return t, None
        if num_choices not in (None, t.shape[1]):
            raise InputError(f"{name} has {t.shape[1]} choices an example; input_ids has {num_choices}")
        return t.flatten(0, 1), t.shape[1]
    rows = _rows(name, values)
    nested = [isinstance(row, Sequence) and len(row) > 0 and _is_many(row[0]) for row in rows]
    if not any(nested):
        return rows, None
    counts = {len(row) if inner else 0 for row, inner in zip(rows, nested, strict=True)}
    if len(counts | ({num_choices} - {None})) > 1:
        raise InputError(f"every example must have as many choices in every field; {name} has {sorted(counts)}")
    return [choice for row in rows for choice in row], len(rows[0])


_NUMBERS = (int, float, np.number, np.bool_)


def labels_of_tokens(labels: Any, num_choices: int | None) -> Any:
    """The labels if they are integers in two dimensions, of tokens; None if they are of sequences."""
    if num_choices is not None:
        return None
    dim = 2 if is_array(labels) else 1
    rows = [labels] if is_array(labels) else _rows("labels", labels)
    if not is_array(labels) and all(isinstance(row, _NUMBERS) for row in rows):
        return None
    tensors = [tensor("labels", row) for row in rows]
    return labels if any(row.dim() >= dim and (is_integer(row) or not row.numel()) for row in tensors) else None


def labels_of_sequences(name: str, values: Any, num_examples: int) -> torch.Tensor:
    t = tensor(name, values)
    if t.dim() == 0 or t.shape[0] != num_examples:
        raise InputError(f"{name} has shape {tuple(t.shape)}; there are {num_examples} sequences")
    if t.is_floating_point() and name == "labels":
        return t
    return integers(name, t)


def joined(name: str, given: Any) -> tuple[torch.Tensor, list[int]]:
    """Lists of integers one after the other, int64, and their lengths."""
    rows = _rows(name, given)
    lengths = list(map(len, rows)) if all(type(row) in _PLAIN_ROWS for row in rows) else []
    try:  # all at once: torch's calls for each of hundreds of rows take a millisecond
        joined = np.concatenate([row for row, n in zip(rows, lengths, strict=True) if n]) if any(lengths) else None
    except (ValueError, OverflowError):
        joined = None
    if joined is not None and joined.ndim == 1 and joined.dtype.kind in "iu" and len(joined) == sum(lengths):
        return torch.from_numpy(joined.astype(np.int64, copy=False)), lengths
    tensors = [_row(name, row) for row in rows]  # whatever else makes rows; or it is none, and this says why
    return torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.int64), [len(row) for row in tensors]


_PLAIN_ROWS = (list, tuple, np.ndarray)


def _row(name: str, values: Any) -> torch.Tensor:
    row = integers(name, values)
    if row.dim() != 1:
        raise InputError(f"{name} holds a sequence of shape {tuple(row.shape)}; it must be a list of lists of integers")
    return row
