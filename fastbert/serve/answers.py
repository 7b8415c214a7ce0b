"""From the model's rows to what is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fastbert.sentences import Reranker
from fastbert.sentences.scorer import SequenceScorer
from fastbert.serve.engine import Engine


def unit_length(vectors: np.ndarray) -> np.ndarray:
    """Rows of length 1, the same numbers as SentenceEncoder's; a zero row stays zero."""
    return F.normalize(torch.from_numpy(vectors), dim=-1).numpy()


def ranking(engine: Engine, logits: np.ndarray, raw: bool, texts: list[str] | None) -> list[dict[str, Any]]:
    """The texts by their score, the best first; equal ones keep their order."""
    assert isinstance(engine.model, Reranker)
    scores = logits[:, 0] if raw else engine.model.scores(torch.from_numpy(logits)).numpy()
    order = np.argsort(-scores, kind="stable").tolist()
    if texts is None:
        return [{"index": i, "score": scores[i]} for i in order]
    return [{"index": i, "text": texts[i], "score": scores[i]} for i in order]


def predictions(engine: Engine, logits: np.ndarray, raw: bool) -> list[list[dict[str, Any]]]:
    """For each input the labels with their scores, the best first."""
    assert isinstance(engine.model, SequenceScorer)
    scores = logits if raw else engine.model.probabilities(torch.from_numpy(logits)).numpy()
    found = []
    for row in scores:
        order = np.argsort(-row, kind="stable").tolist()
        found.append([{"score": row[i], "label": engine.labels[i]} for i in order])
    return found
