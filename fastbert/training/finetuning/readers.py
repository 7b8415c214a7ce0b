"""What `fastbert predict` says of the rows of a file, for every task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastbert.data.chunks import Windows
from fastbert.data.usage import Usage
from fastbert.errors import InputError
from fastbert.sentences.classifier import TextClassifier
from fastbert.sentences.spans.question_answerer import QuestionAnswerer
from fastbert.sentences.spans.token_classifier import TokenClassifier
from fastbert.sentences.text_model import InferenceOptions
from fastbert.training.finetuning.inputs.rows import TEXTS, inputs_of, text_columns
from fastbert.training.finetuning.inputs.tagged import WORDS

Columns = dict[str, Any]


def label_columns(
    classifier: TextClassifier,
    texts: Mapping[str, Sequence[str]],
    *,
    batch_tokens: int | None = None,
    windows: Windows | None = None,
    aggregate: Any = None,
    threshold: float = 0.5,
    every: bool = False,
) -> Columns:
    """The texts; `label` and its probability `score`; `labels` and `scores` above the threshold, of several at once; or
    `value`. `every`: the probability of each label, too. Raises ConfigError: an unknown problem_type; InputError.
    """
    windows = classifier.windows if windows is None else windows
    options = InferenceOptions(batch_tokens=batch_tokens, windows=windows, aggregate=aggregate)
    logits = classifier.rows_of_inputs(inputs_of(list(texts.values())), options).cpu()
    names, problem = classifier.labels, classifier.problem_type
    if problem == "regression":
        values = logits.numpy()
        return {**texts, **({"value": values[:, 0]} if len(names) == 1 else dict(zip(names, values.T, strict=True)))}
    scores = classifier.probabilities(logits).numpy()
    if problem == "multi_label_classification":
        above = [np.flatnonzero(row > threshold) for row in scores]
        columns: Columns = {
            "labels": [[names[i] for i in chosen] for chosen in above],
            "scores": [row[chosen].tolist() for row, chosen in zip(scores, above, strict=True)],
        }
    else:
        columns = {"label": [names[i] for i in logits.argmax(-1)], "score": scores.max(-1)}
    return {**texts, **columns, **(dict(zip(names, scores.T, strict=True)) if every else {})}


def entity_columns(
    tagger: TokenClassifier,
    texts: Mapping[str, Sequence[Any]],
    *,
    batch_tokens: int | None = None,
    windows: Windows | None = None,
    aggregate: Any = None,
) -> Columns:
    """`text`, and its `entities`, each with its label, text, characters and probability. Raises InputError."""
    (inputs,) = texts.values()
    words = [one if isinstance(one, str) else " ".join(one) for one in inputs]
    job = tagger.entities_job(inputs, windows, aggregate or "core")
    return {"text": words, "entities": job.run(tagger.device, batch_tokens)}


def answer_columns(
    finder: QuestionAnswerer,
    texts: Mapping[str, Sequence[str]],
    *,
    batch_tokens: int | None = None,
    windows: Windows | None = None,
    aggregate: Any = None,
) -> Columns:
    """`question`, its `answer`, the answer's probability `score`, and its characters `start` and `end`. Raises
    InputError.
    """
    questions, contexts = texts.values()
    job = finder.answers_job(list(zip(questions, contexts, strict=True)), windows, aggregate or "logits")
    return {"question": list(questions), **job.run(finder.device, batch_tokens)}


class TaskReader(NamedTuple):
    """model: what reads a folder. columns: what it says of texts. examples: a value of each column that holds lists,
    which say a parquet file's types even where the first rows have none.
    """

    model: Any
    columns: Callable[..., Columns]
    examples: Mapping[str, Any]


_ENTITY = {"label": "", "text": "", "start": 0, "end": 0, "score": 0.0}
READERS = {
    "classification": TaskReader(TextClassifier, label_columns, {"labels": [""], "scores": [0.0]}),
    "tokens": TaskReader(TokenClassifier, entity_columns, {"entities": [_ENTITY]}),
    "qa": TaskReader(QuestionAnswerer, answer_columns, {}),
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
        column = next((name for name in (*TEXTS, *WORDS) if name in names), None)
        return (column,) if column else text_columns(names, (), where, flag="--columns")
    columns = text_columns(names, (), where, flag="--columns")
    if usage.text_columns and len(columns) != len(usage.text_columns):
        return _all_of(usage.text_columns, names, where)
    return columns


def _all_of(wanted: Sequence[str], names: Sequence[str], where: str) -> tuple[str, ...]:
    if missing := [name for name in wanted if name not in names]:
        raise InputError(
            f"{where} has no column {missing[0]!r}; name others for {', '.join(wanted)} with --columns. It has:"
            f" {', '.join(names)}"
        )
    return tuple(wanted)
