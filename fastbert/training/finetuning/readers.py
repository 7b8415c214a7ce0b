"""From inputs to answers, for every task: what `fastbert predict` runs, and what an evaluation during training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastbert.errors import InputError
from fastbert.models import auto
from fastbert.training.finetuning.classification import Classifier
from fastbert.training.finetuning.inputs.rows import TEXTS, text_columns
from fastbert.training.finetuning.inputs.tagged import WORDS
from fastbert.training.finetuning.question_answering import Finder
from fastbert.training.finetuning.tokens import Tagger
from fastbert.training.finetuning.usage import Usage


class Kind(NamedTuple):
    """model: the Auto class. reader: what makes answers. examples: a value of each column that holds lists, which say
    a parquet file's types even where the first rows have none.
    """

    model: Any
    reader: Any
    examples: Mapping[str, Any]


_ENTITY = {"label": "", "text": "", "start": 0, "end": 0, "score": 0.0}
KINDS = {
    "classification": Kind(auto.AutoModelForSequenceClassification, Classifier, {"labels": [""], "scores": [0.0]}),
    "tokens": Kind(auto.AutoModelForTokenClassification, Tagger, {"entities": [_ENTITY]}),
    "qa": Kind(auto.AutoModelForQuestionAnswering, Finder, {}),
}


def input_columns(usage: Usage, names: Sequence[str], where: str) -> tuple[str, ...]:
    """Which columns of a file a fine-tuned model reads: those it was trained on, else by their usual names.

    Raises InputError, listing what there is.
    """
    if usage.text_columns and set(usage.text_columns) <= set(names):
        return usage.text_columns
    if usage.task == "qa":
        return _all_of(("question", "context"), names, where)
    if usage.task == "tokens":
        found = next((name for name in (*TEXTS, *WORDS) if name in names), None)
        return (found,) if found else text_columns(names, (), where, flag="--columns")
    found_texts = text_columns(names, (), where, flag="--columns")
    if usage.text_columns and len(found_texts) != len(usage.text_columns):
        return _all_of(usage.text_columns, names, where)
    return found_texts


def _all_of(wanted: Sequence[str], names: Sequence[str], where: str) -> tuple[str, ...]:
    if missing := [name for name in wanted if name not in names]:
        raise InputError(
            f"{where} has no column {missing[0]!r}; name others for {', '.join(wanted)} with --columns. It has:"
            f" {', '.join(names)}"
        )
    return tuple(wanted)
