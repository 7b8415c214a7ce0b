"""Questions on texts, with answers in them: SQuAD's JSON, or rows as `datasets` has them; and SQuAD's measure."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastbert.data.sources import check_columns, load_source
from fastbert.errors import InputError

COLUMNS = ("question", "context", "answers")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Questions:
    """answers: for each question the texts and where they begin in its context; none: it has no answer there."""

    ids: list[str] = field(repr=False)
    questions: list[str] = field(repr=False)
    contexts: list[str] = field(repr=False)
    answers: list[list[tuple[str, int]]] = field(repr=False)
    name: str


def load_questions(
    names: Sequence[str], split: str, *, with_answers: bool = True, delimiter: str | None = None
) -> Questions:
    """Raises InputError, naming the question: nothing there, a part that is missing, or an empty one."""
    name = ", ".join(names)
    data = Questions([], [], [], [], name)
    if not delimiter and all(Path(path).suffix.lower() == ".json" and Path(path).is_file() for path in names):
        for path in names:
            _read_squad(Path(path), data, with_answers)
    else:
        rows = load_source(list(names), split, delimiter=delimiter)
        check_columns(rows, COLUMNS if with_answers else COLUMNS[:2], name)
        ids = rows["id"][:] if "id" in rows.column_names else range(1, len(rows) + 1)
        answers = rows["answers"][:] if with_answers else [None] * len(rows)
        for one in zip(ids, rows["question"][:], rows["context"][:], answers, strict=True):
            _add(data, *one, with_answers)
    if not data.questions:
        raise InputError(f"{name} holds no questions")
    return data


def _read_squad(path: Path, data: Questions, with_answers: bool) -> None:
    try:
        squad = json.loads(path.read_bytes())
        for article in squad["data"]:
            for paragraph in article["paragraphs"]:
                for one in paragraph["qas"]:
                    answers = None if one.get("is_impossible") else one.get("answers")
                    listed = [] if one.get("is_impossible") else answers
                    _add(data, one["id"], one["question"], paragraph["context"], listed, with_answers)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path} is no SQuAD file, which has data, paragraphs, qas: {type(error).__name__}: {error}"
        ) from None


def _add(data: Questions, key: Any, question: Any, context: Any, answers: Any, with_answers: bool) -> None:
    where = f"{data.name}, question {key}"
    for what, text in (("question", question), ("context", context)):
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{where}: the {what} is {'empty' if isinstance(text, str) else repr(text)}")
    data.ids.append(str(key))
    data.questions.append(question.strip())
    data.contexts.append(context)
    data.answers.append(_answers(answers, where) if with_answers else [])


def _answers(answers: Any, where: str) -> list[tuple[str, int]]:
    """From SQuAD's list of answers, or `datasets`' lists of texts and places."""
    if isinstance(answers, dict):
        answers = [dict(zip(answers, pair, strict=True)) for pair in zip(*answers.values(), strict=True)]
    try:
        pairs = [(answer["text"], answer["answer_start"]) for answer in answers]
    except (TypeError, KeyError):
        raise InputError(
            f"{where}: its answers need a text and an answer_start each; they are {answers!r:.80}"
        ) from None
    if bad := [pair for pair in pairs if not isinstance(pair[0], str) or not isinstance(pair[1], int)]:
        raise InputError(f"{where}: an answer is {bad[0]!r:.80}; it must be a text and a place")
    return pairs


def normalized(text: str) -> str:
    """As SQuAD's evaluation compares answers: lower case, no punctuation, no articles, single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(said: str, wanted: str) -> float:
    return float(normalized(said) == normalized(wanted))


def f1(said: str, wanted: str) -> float:
    """Of the words that both have (Rajpurkar et al. 2016, section 6.1). No answer is right against no answer alone."""
    a, b = normalized(said).split(), normalized(wanted).split()
    if not a or not b:
        return float(a == b)
    common = sum((Counter(a) & Counter(b)).values())
    return 2.0 * common / (len(a) + len(b))


def squad_metrics(said: Sequence[str], wanted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Exact match and F1 in per cent, of the best of each question's answers."""
    best = [(texts or [""], answer) for texts, answer in zip(wanted, said, strict=True)]
    count = max(1, len(best))
    return {
        "exact_match": 100.0 * sum(max(exact_match(answer, text) for text in texts) for texts, answer in best) / count,
        "f1": 100.0 * sum(max(f1(answer, text) for text in texts) for texts, answer in best) / count,
    }
