"""From the model's rows to what is sent."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from starlette.responses import Response

from fastbert.data.sentence_folder import Normalize
from fastbert.sentences import Reranker
from fastbert.sentences.scorer import SequenceScorer
from fastbert.serve import json_text
from fastbert.serve.engine import Engine


def as_json(content: Any) -> Response:
    return Response(json_text.dumps(content), media_type="application/json")


def unit_length(vectors: np.ndarray) -> np.ndarray:
    """Rows of length 1, the same numbers as SentenceEncoder's; a zero row stays zero."""
    return Normalize()(torch.from_numpy(vectors)).numpy()


def ranking(
    engine: Engine,
    logits: np.ndarray,
    raw: bool,
    texts: list[str] | None,
    passages: list[tuple[int, int]] | None = None,
) -> list[dict[str, Any]]:
    """The texts by their score, the best first; equal ones keep their order. `passages`: where each one's best is."""
    assert isinstance(engine.model, Reranker)
    scores = logits[:, 0] if raw else engine.model.scores(torch.from_numpy(logits)).numpy()
    found = []
    for i in np.argsort(-scores, kind="stable").tolist():
        text = {} if texts is None else {"text": texts[i]}
        place = {} if passages is None else dict(zip(("start", "end"), passages[i], strict=True))
        found.append({"index": i, **text, "score": scores[i], **place})
    return found


def predictions(engine: Engine, logits: np.ndarray, raw: bool) -> list[list[dict[str, Any]]]:
    """For each input the labels with their scores, the best first."""
    assert isinstance(engine.model, SequenceScorer)
    scores = logits if raw else engine.model.probabilities(torch.from_numpy(logits)).numpy()
    found = []
    for row in scores:
        order = np.argsort(-row, kind="stable").tolist()
        found.append([{"score": row[i], "label": engine.labels[i]} for i in order])
    return found


def by_pipeline(entities: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entities of a text under the names of Hugging Face's pipelines."""
    names = {"label": "entity_group", "text": "word"}
    return [{names.get(name, name): value for name, value in one.items()} for one in entities]


def encoded(vectors: np.ndarray, encoding_format: str) -> Any:
    """As numbers, or as OpenAI has them in base64: float32, the low byte first."""
    if encoding_format == "base64":
        return [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    return vectors
