"""Labels of whole inputs: from a column to what a model learns, one class, several at once, or a number."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fastbert.errors import ConfigError, InputError
from fastbert.training.finetuning.inputs.rows import is_number, missing_label, number_of

if TYPE_CHECKING:
    from datasets import Dataset

_ABSENT = ("na", "n/a", "null", "none")  # in a column of numbers: no label
_BITS = {"0": 0, "1": 1, "0.0": 0.0, "1.0": 1.0, "false": 0, "true": 1}  # of multi-hot rows, where they are texts
_BRACKETS: dict[str, Any] = {"[]": list, "()": tuple, "{}": (set, dict)}  # of lists that are texts, and what they are
_ONE_IN_BRACKETS = re.compile(r"\[[^\s,'\"\[\]]+\]")  # such as [7], a list of JSON, which may be a name
Problem = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclass(frozen=True)
class Labels:
    """What the labels of a column mean. names: of the classes, in the model's order; empty for a regression.
    is_multi_hot: a row has a 0 or a 1 for each of the names, in their order.
    """

    problem: Problem
    names: tuple[str, ...]
    column: str
    is_multi_hot: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """What a model's config says of them."""
        if self.problem == "regression":
            return {"num_labels": 1, "problem_type": self.problem}
        return {"id2label": dict(enumerate(self.names)), "problem_type": self.problem}

    def in_order_of(self, own: Mapping[int, str], source: str) -> Labels:
        """These in the order of the head that a checkpoint brings. Raises ConfigError: it is for other labels."""
        names = tuple(own[i] for i in range(len(own)))
        if self.is_multi_hot and len(names) == len(self.names):
            return replace(self, names=names)
        if not self.names or set(names) == {f"LABEL_{i}" for i in range(len(names))}:
            return self
        if set(names) != set(self.names):
            raise ConfigError(f"{source} has a head for {', '.join(names)}; the data have {', '.join(self.names)}")
        return replace(self, names=names)

    def values(self, rows: Dataset, where: str) -> np.ndarray:
        """int64 (rows,) classes; float32 (rows,) numbers; or float32 (rows, names) of 0 and 1.

        Raises InputError, naming the row: a label that is missing, of another kind, or not among the names.
        """
        values = _all_there(rows, self.column, where)
        if self.problem == "regression":
            return np.array([number_of(value, where, i, self.column) for i, value in enumerate(values)], np.float32)
        if self.is_multi_hot:
            rows_of_bits = [_bits_of(value) for value in values]
            for i, (value, bits) in enumerate(zip(values, rows_of_bits, strict=True)):
                if len(bits) != len(self.names):
                    raise InputError(
                        f"{where}, row {i + 1}: {self.column} is {value!r:.80}; it must be a 0 or a 1 for each of the"
                        f" {len(self.names)} labels"
                    )
            return np.array(rows_of_bits, np.float32)
        index_of = {name: i for i, name in enumerate(self.names)}
        if self.problem == "single_label_classification":
            return np.array([self._class_index(index_of, value, where, i) for i, value in enumerate(values)], np.int64)
        targets = np.zeros((len(values), len(self.names)), np.float32)
        for i, value in enumerate(values):
            for name in several(value):
                targets[i, self._class_index(index_of, name, where, i)] = 1.0
        return targets

    def _class_index(self, index_of: dict[str, int], value: Any, where: str, row: int) -> int:
        index = index_of.get(str(value))
        if index is None:
            known = ", ".join(self.names[:10]) + (", ..." if len(self.names) > 10 else "")
            raise InputError(
                f"{where}, row {row + 1}: {self.column} is {value!r}, which is none of the {len(self.names)} labels of"
                f" the training data: {known}"
            )
        return index


def find_labels(rows: Dataset, column: str, where: str, problem: str, encoding: str = "auto") -> Labels:
    """What the labels of the training rows mean, by `problem` and `encoding` (--label-type), or by what they look like
    ("auto"): lists are several labels at once, names or multi-hot rows; numbers with a fraction a regression.

    Raises InputError: a label that is missing, or what may be meant in two ways, with the first rows.
    """
    values = _all_there(rows, column, where)
    first = f"{where}: {column} is {', '.join(map(repr, values[:3]))}{', ...' if len(values) > 3 else ''}"
    if problem == "auto":
        problem = _problem_of(values, first)
    is_several = problem == "multi_label_classification"
    if encoding != "auto" and not is_several:
        raise InputError(f"label_type {encoding} is for several labels a row; problem_type is {problem}")
    if problem == "regression":
        return Labels("regression", (), column)
    if not is_several and any(isinstance(value, list) for value in values):
        raise InputError(f"{where}: {column} holds lists, and problem_type {problem} has one label a row")
    if is_several and class_names(rows, column) == () and _are_multi_hot(values, encoding, first):
        width = len(_bits_of(values[0]))
        if not width:
            what = "a row of several labels has a list of a 0 or a 1 for each of them"
            raise InputError(f"{where}, row 1: {column} is {values[0]!r:.80}; {what}, if label_type is multi_hot")
        return Labels(problem, tuple(f"LABEL_{i}" for i in range(width)), column, True)  # type: ignore[arg-type]
    distinct = {name for value in values for name in several(value)} if is_several else set(values)
    names = class_names(rows, column) or tuple(str(value) for value in in_order(distinct))
    if len(names) < (1 if is_several else 2):
        raise InputError(f"{where}: {column} has one label alone, {names[0]!r}: there is nothing to learn")
    return Labels(problem, names, column)  # type: ignore[arg-type]


def _all_there(rows: Dataset, column: str, where: str) -> list[Any]:
    values = plain(rows, column)
    missing = [i for i, value in enumerate(values) if _is_missing(value)]
    absent = [i for i, value in enumerate(values) if isinstance(value, str) and value.strip().lower() in _ABSENT]
    if absent and all(is_number(values[i]) for i in set(range(len(values))).difference(missing, absent)):
        missing = sorted({*missing, *absent})  # among names these are names
    if missing and len(missing) == len(values):
        raise InputError(f"{where}: {column} is empty in all rows")
    if missing:
        raise missing_label(where, missing[0], column)
    return values


def in_order(values: set[Any]) -> list[Any]:
    """Numbers by their size, as those of a .csv, where all are texts of whole numbers; texts by the alphabet."""
    if all(isinstance(value, str) and value.isdecimal() for value in values):
        return sorted(values, key=lambda value: (int(value), value))
    numbers = [value for value in values if isinstance(value, (int, float))]
    return sorted(numbers) + sorted((value for value in values if not isinstance(value, (int, float))), key=str)


def plain(rows: Dataset, column: str) -> list[Any]:
    """The values of a column, texts without white space around them; the names of classes where `datasets` knows them.
    -1 is its "no label": None here.
    """
    values, names = rows[column][:], class_names(rows, column)
    if not names:
        return [_stripped(value) for value in values]

    def named(value: Any) -> Any:
        if isinstance(value, list):
            return [named(one) for one in value]
        return None if value is None or value < 0 else names[value]

    return [named(value) for value in values]


def _stripped(value: Any) -> Any:
    """ " pos", as in a .csv with a blank behind its commas, is "pos"."""
    if isinstance(value, list):
        return [_stripped(one) for one in value]
    return value.strip() if isinstance(value, str) else value


def class_names(rows: Dataset, column: str) -> tuple[str, ...]:
    """Those that `datasets` knows of a column, in their order; empty for others."""
    feature = rows.features[column]
    feature = getattr(feature, "feature", feature)  # of lists
    return tuple(feature.names) if type(feature).__name__ == "ClassLabel" else ()


def several(value: Any) -> list[Any]:
    """The labels of a row that has several: a list, or names with commas between them."""
    if isinstance(value, list):
        return value
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else [value]


def class_weights(spec: Sequence[str], labels: Labels, values: np.ndarray) -> np.ndarray | None:
    """How much each class counts, float32 (classes,): "balanced" (a class that is rare counts more, as scikit-learn's),
    or a number a class. They are scaled so that their mean over the training rows is 1. Raises ConfigError.
    """
    if not spec:
        return None
    if labels.problem != "single_label_classification":
        raise ConfigError(f"class_weights are for one label a row; this is a {labels.problem}")
    counts = np.bincount(values, minlength=len(labels.names))
    if tuple(spec) == ("balanced",):
        weights = np.where(counts > 0, len(values) / (len(counts) * np.maximum(counts, 1)), 0.0)
    else:
        try:
            weights = np.array([float(weight) for weight in spec])
        except ValueError:
            raise ConfigError(f"class_weights is {' '.join(spec)}; it must be balanced, or a number a label") from None
        if len(weights) != len(counts) or not np.isfinite(weights).all() or (weights < 0).any():
            raise ConfigError(
                f"class_weights has {len(weights)} numbers for {len(counts)} labels ({', '.join(labels.names)}); they"
                " must be 0 or more, one a label"
            )
    mean = float((weights * counts).sum() / len(values))
    if not mean > 0:
        raise ConfigError("class_weights leaves no row of the training data a weight above 0")
    return (weights / mean).astype(np.float32)


def _problem_of(values: list[Any], first: str) -> Problem:
    if isinstance(values[0], list) or any(_is_list_as_text(value) for value in values):
        return "multi_label_classification"
    rows_of_bits = [_bits_of(value) for value in values if isinstance(value, str) and "," in value]
    if len(rows_of_bits) == len(values) and (_is_of_one_width(rows_of_bits) or _has_doubles(rows_of_bits)):
        several_or_one = "--problem-type multi_label_classification, or single_label_classification"
        raise InputError(f"{first}: a 0 or a 1 for each label, or a label by itself? Say {several_or_one}")
    if not all(map(is_number, values)) or all(_is_whole(value) for value in values):
        return "single_label_classification"
    if all(float(value).is_integer() for value in values):  # such as 1.0
        raise InputError(f"{first}: numbers, or labels? Say --problem-type regression, or single_label_classification")
    return "regression"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and value.strip().lstrip("+-").isdecimal())


def _are_multi_hot(values: list[Any], encoding: str, first: str) -> bool:
    """Whether rows of several labels have a 0 or a 1 for each label, and are no lists of names."""
    lists = [value for value in values if _is_list_as_text(value)]
    may_be_names = all(map(_ONE_IN_BRACKETS.fullmatch, map(str.strip, lists)))
    if lists and not (encoding == "names" and may_be_names):
        ways = "Give lists in a .jsonl or a .parquet, or commas alone (a,b). Where names have brackets, say"
        more = ", or --label-type names" if may_be_names else ""
        raise InputError(f"{first}: lists written as texts? {ways} --problem-type single_label_classification{more}")
    if encoding != "auto":
        return encoding == "multi_hot"
    rows_of_bits = [_bits_of(value) for value in values]
    is_even, is_no_set = _is_of_one_width(rows_of_bits), _has_doubles(rows_of_bits)
    if is_even and (is_no_set or any(isinstance(bits[0], float) for bits in rows_of_bits)):
        return True
    if is_even or is_no_set:
        raise InputError(f"{first}: a 0 or a 1 for each label, or names? Say --label-type multi_hot, or names")
    if any(isinstance(one, float) for value in values for one in several(value)):
        raise InputError(f"{first}: fractions are no names of labels. Say --label-type names if they are")
    return False


def _bits_of(value: Any) -> list[Any]:
    """The 0 and 1 of a multi-hot row: a list, or a text with commas between them. Empty for what is none."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list):
        return []
    bits = [_BITS.get(one.strip().lower()) if isinstance(one, str) else one for one in parts]
    return bits if all(one in (0, 1) for one in bits) else []


def _is_of_one_width(rows_of_bits: list[list[Any]]) -> bool:
    return all(rows_of_bits) and len(set(map(len, rows_of_bits))) == 1


def _has_doubles(rows_of_bits: list[list[Any]]) -> bool:
    """Whether a row has a number twice: that is no set of names, whatever the other rows are."""
    return any(len(set(bits)) < len(bits) for bits in rows_of_bits)


def _is_list_as_text(value: Any) -> bool:
    """Of JSON, Python or NumPy, or without quotation marks: "[a, b]"; also tuples and sets. A name may stand in
    brackets, too: "[PER]", "[PER], [LOC]".
    """
    text = value.strip() if isinstance(value, str) else ""
    if text[:1] + text[-1:] not in _BRACKETS:
        return False
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return isinstance(read(text), _BRACKETS[text[0] + text[-1]])
    first, comma, _ = text.partition(",")
    is_cut = bool(comma) and text[-1] not in first  # at its commas it would fall into names with one bracket
    return is_cut or all(map(is_number, text[1:-1].split()))


def _is_missing(value: Any) -> bool:
    """Of a list, whether one of its labels is."""
    if isinstance(value, list):
        return any(map(_is_missing, value))
    if isinstance(value, str):
        return value.strip().lower() in ("", "nan")
    return value is None or (isinstance(value, float) and math.isnan(value))
