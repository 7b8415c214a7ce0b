"""How good checkpoints are on a labelled file: what `fastbert compare` puts beside their speed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDS = 5  # of the linear probe


@dataclass(frozen=True)
class LabelledTexts:
    """Texts, or both texts of pairs, with a label or a score each."""

    columns: tuple[list[str], ...]
    answers: list[Any]
    is_scored: bool  # pairs with numbers: similarity, relevance


def read_labelled(path: Path, delimiter: str | None = None) -> LabelledTexts:
    """Raises InputError or TextFileError."""
    import numpy as np

    from fastbert.data.sources import load_source
    from fastbert.errors import InputError
    from fastbert.training.finetuning.inputs.rows import (
        is_number,
        label_column,
        missing_label,
        text_columns,
        texts_of,
    )

    rows, where = load_source([str(path)], delimiter=delimiter), str(path)
    names = rows.column_names
    columns, answer = text_columns(names, (), where), label_column(names, "", where)
    answers = rows[answer][:]
    for i, value in enumerate(answers):
        if value is None or value == "":
            raise missing_label(where, i, answer)
        if not isinstance(value, (str, int, float)):
            raise InputError(f"{where}, row {i + 1}: {answer} is {value!r}; it must be a label or a number")
    is_scored = len(columns) == 2 and all(isinstance(value, bool) or is_number(value) for value in answers)
    if is_scored:
        answers = [float(value) for value in answers]
    elif all(str(value).isdecimal() and str(int(value)) == value for value in answers):  # a .csv's
        answers = [int(value) for value in answers]
    if is_scored and (len(answers) < 2 or not np.isfinite(np.array(answers, np.float64)).all()):
        raise InputError(f"{where}: at least two rows with a finite {answer} are needed")
    return LabelledTexts(tuple(texts_of(rows, column, where) for column in columns), answers, is_scored)


def quality_of(name: str, data: LabelledTexts, dtype: str) -> dict[str, Any] | None:
    """What is measured of a checkpoint, and the share that it reaches; None if such rows do not judge such a model.

    Pairs with scores: Spearman's rank correlation of a reranker's scores, or of the cosines of an encoder's vectors.
    Labels: a classifier's accuracy; of an encoder the accuracy of a linear classifier on its vectors, in five folds.
    Raises InputError: a label that a classifier lacks, or of which an encoder has fewer than five texts.
    """
    from fastbert.checkpoint.pretrained import is_classifier, read_config
    from fastbert.data.sentence_folder import transformer_folder
    from fastbert.hub import resolve

    config = read_config(transformer_folder(resolve(name)))
    if is_classifier(config):
        return _of_classifier(name, data, dtype)
    if data.is_scored:
        return {"measure": "Spearman of cosines", "value": _rank_correlation(_cosines(name, data, dtype), data.answers)}
    return None if len(data.columns) == 2 else {"measure": "linear probe", "value": _probe(name, data, dtype)}


def _of_classifier(name: str, data: LabelledTexts, dtype: str) -> dict[str, Any] | None:
    from fastbert.errors import InputError
    from fastbert.sentences import Reranker, TextClassifier

    if data.is_scored:
        reranker = Reranker(name, dtype=dtype)
        if reranker.num_labels != 1:
            return None
        scores = reranker.predict(list(zip(*data.columns, strict=True)))
        return {"measure": "Spearman of scores", "value": _rank_correlation(scores, data.answers)}
    classifier = TextClassifier(name, dtype=dtype)
    if classifier.num_labels == 1:
        return None
    index_of = {label: i for i, label in enumerate(classifier.labels)}
    expected = []
    for row, answer in enumerate(data.answers):
        index = index_of.get(str(answer), answer if isinstance(answer, int) else -1)
        if not 0 <= index < len(index_of):
            raise InputError(f"row {row + 1} has the label {answer!r}; the model has {', '.join(index_of)}")
        expected.append(index)
    texts = data.columns[0] if len(data.columns) == 1 else list(zip(*data.columns, strict=True))
    said = classifier.predict(texts).argmax(-1)
    return {"measure": "accuracy", "value": float((said == expected).mean())}


def _cosines(name: str, data: LabelledTexts, dtype: str) -> Any:
    import torch

    from fastbert.sentences import SentenceEncoder

    encoder = SentenceEncoder(name, dtype=dtype)
    first, second = (encoder.encode(texts, convert_to_tensor=True).float() for texts in data.columns)
    return torch.nn.functional.cosine_similarity(first, second).cpu().numpy()


def _probe(name: str, data: LabelledTexts, dtype: str) -> float:
    from fastbert.errors import InputError
    from fastbert.inspect import linear_probe
    from fastbert.sentences import SentenceEncoder

    vectors = SentenceEncoder(name, dtype=dtype).encode(data.columns[0], convert_to_tensor=True)
    try:
        return float(linear_probe(vectors[None], data.answers, FOLDS)[0])
    except ValueError as error:
        raise InputError(str(error)) from None


def _rank_correlation(predicted: Any, scores: list[Any]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(predicted, scores)[0])
