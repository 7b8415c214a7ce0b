"""The labelled rows of a fine-tuning: files or data sets, and which of their columns are texts and labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastbert.data.sources import check_columns, check_texts, delimiter_for, load_source
from fastbert.data.tokenized import Text
from fastbert.errors import InputError
from fastbert.training.options import FinetuneOptions

if TYPE_CHECKING:
    from datasets import Dataset

# Names that data sets have, the likeliest first.
PAIRS = (
    ("sentence1", "sentence2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("text", "text_pair"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("query", "passage"),
    ("query", "document"),
)
TEXTS = ("text", "sentence", "review", "content", "document", "utterance")
LABELS = ("label", "labels", "category", "intent", "class", "score", "target", "rating", "stars")


@dataclass(frozen=True)
class Rows:
    """Rows to learn from, and to judge by; None where there are none. `name` is what messages call them."""

    train: Dataset
    eval: Dataset | None
    train_name: str
    eval_name: str


def load_rows(options: FinetuneOptions) -> Rows:
    """Raises InputError: nothing there, nothing in it, or what cannot be read."""
    if not options.train:
        raise InputError("train is missing: the file to learn from")
    train_name, eval_name = (", ".join(names) for names in (options.train, options.eval))
    train = _load(options.train, options, "train")
    held_out = _load(options.eval, options, "validation") if options.eval else None
    for rows, name in ((train, train_name), (held_out, eval_name)):
        if rows is not None and not len(rows):
            raise InputError(f"{name} holds no rows")
    return Rows(train, held_out, train_name, eval_name)


def _load(names: Sequence[str], options: FinetuneOptions, split: str) -> Dataset:
    sign = delimiter_for(names, (*options.train, *options.eval), options.delimiter)
    return load_source(list(names), split, delimiter=sign)


def text_columns(
    names: Sequence[str], chosen: Sequence[str], where: str, flag: str = "--text-columns"
) -> tuple[str, ...]:
    """The column of texts, or the two of pairs of texts. Raises InputError, listing what there is."""
    if chosen:
        if len(chosen) > 2:
            raise InputError(f"text_columns has {len(chosen)} names; an example is one text or a pair of texts")
        if missing := [name for name in chosen if name not in names]:
            raise InputError(f"{where} has no column {missing[0]!r}; it has: {', '.join(names)}")
        return tuple(chosen)
    for pair in PAIRS:
        if set(pair) <= set(names):
            return pair
    for text in TEXTS:
        if text in names:
            return (text,)
    raise InputError(
        f"no column of {where} has a name that texts usually have; choose one, or two, with {flag}: {', '.join(names)}"
    )


def label_column(names: Sequence[str], chosen: str, where: str) -> str:
    """Raises InputError, listing what there is."""
    if chosen:
        if chosen not in names:
            raise InputError(f"{where} has no column {chosen!r}; it has: {', '.join(names)}")
        return chosen
    for name in LABELS:
        if name in names:
            return name
    if not names:
        raise InputError(f"{where} has texts alone, and no column of labels")
    raise InputError(
        f"no column of {where} has a name that labels usually have; choose one with --label-column: {', '.join(names)}"
    )


def check_same_columns(rows: Rows, columns: Sequence[str]) -> None:
    """Raises InputError if the rows to judge by lack one."""
    if rows.eval is not None:
        check_columns(rows.eval, columns, rows.eval_name)


def texts_of(rows: Dataset, column: str, where: str) -> list[str]:
    """The texts of a column. Raises InputError, naming the row: no text there, or an empty one."""
    texts = rows[column][:]
    check_texts(texts, range(len(texts)), column, where)
    for i, text in enumerate(texts):
        if "\0" in text:
            raise InputError(f"{where}, row {i + 1}: {column} holds a NUL byte; is this a text file?")
        if not text or text.isspace():
            count = sum(not t or t.isspace() for t in texts)
            more = f" (and {count - 1} more rows)" if count > 1 else ""
            raise InputError(f"{where}, row {i + 1}{more}: {column} is empty: leave such rows out")
    return texts


def inputs_of(texts: Sequence[Sequence[str]]) -> list[Text]:
    """Texts, of one column of them; or pairs of texts, of two."""
    return list(texts[0]) if len(texts) == 1 else list(zip(*texts, strict=True))  # type: ignore[arg-type]


def number_of(value: Any, where: str, row: int, column: str) -> float:
    """A label that is a number, or one as a .csv has it. Raises InputError, naming the row, for anything else."""
    if not is_number(value) or not math.isfinite(float(value)):
        raise InputError(f"{where}, row {row + 1}: {column} is {value!r}; it must be a number")
    return float(value)


def is_number(value: Any) -> bool:
    """Whether it is one, or a text of one; true and false are none."""
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        return False
    try:
        float(value)
    except (ValueError, OverflowError):
        return False
    return True


def missing_label(where: str, row: int, column: str) -> Any:
    return InputError(f"{where}, row {row + 1}: {column} is missing")
