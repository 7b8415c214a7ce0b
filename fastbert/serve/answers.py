"""From the model's rows to what is sent."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from starlette.responses import Response

from fastbert.data.sentence_folder import Normalize
from fastbert.sentences import Reranker
from fastbert.sentences.scorer import SequenceScorer
from fastbert.serve import json_text
from fastbert.serve.engine import Engine
from fastbert.serve.json_text import MadeJson

PART = 1 << 16  # bytes, between which others have their turn
AT_ONCE = 4096  # numbers, or entries of a list, to JSON: other requests wait for so many


async def as_json(content: Any) -> Response:
    """The answer. A large one is made part by part: orjson holds Python's other threads up, so none could make it."""
    body = bytearray()
    for part in json_parts(content):
        if len(body) // PART < (len(body) + len(part)) // PART:
            await asyncio.sleep(0)
        body += part
    return Response(memoryview(body), media_type="application/json")  # `bytes` of it would be one more large copy


def json_parts(content: Any) -> Iterator[bytes]:
    """What json_text.dumps gives, in parts. The entries of a list are all alike."""
    if isinstance(content, MadeJson):
        yield content
    elif _is_small(content):
        yield json_text.dumps(content)
    elif isinstance(content, dict):
        for i, (name, value) in enumerate(content.items()):
            yield (b"," if i else b"{") + json_text.dumps(name) + b":"
            yield from json_parts(value)
        yield b"}"
    elif len(content) and (isinstance(content, np.ndarray) or _is_small(content[0])):
        step = max(1, AT_ONCE // np.size(content[0]))
        for i in range(0, len(content), step):
            yield (b"," if i else b"[") + json_text.dumps(content[i : i + step])[1:-1]
        yield b"]"
    else:
        yield b"["
        for i, entry in enumerate(content):
            if i:
                yield b","
            yield from json_parts(entry)
        yield b"]"


def _is_small(value: Any) -> bool:
    """A number, a text or null, or an object of these."""
    if isinstance(value, dict):
        return all(not isinstance(entry, dict) and _is_small(entry) for entry in value.values())
    return not isinstance(value, list | tuple | np.ndarray | MadeJson)


def unit_length(vectors: np.ndarray) -> np.ndarray:
    """Rows of length 1, the same numbers as SentenceEncoder's; a zero row stays zero."""
    return Normalize()(torch.from_numpy(vectors)).numpy()


def finished(vectors: np.ndarray, dimensions: int | None, normalize: bool) -> np.ndarray:
    """The first `dimensions` numbers of each, and then of length 1."""
    if dimensions is not None:
        vectors = np.ascontiguousarray(vectors[:, :dimensions])
    return unit_length(vectors) if normalize else vectors


def ranking(
    engine: Engine,
    logits: np.ndarray,
    raw: bool,
    texts: list[str] | None,
    passages: list[tuple[int, int]] | None = None,
) -> list[dict[str, Any]]:
    """The texts by their score, the best first; equal ones keep their order. `passages`: where each one's best is."""
    assert isinstance(engine.model, Reranker)
    return ranked(logits[:, 0] if raw else engine.model.scores(torch.from_numpy(logits)).numpy(), texts, passages)


def ranked(
    scores: np.ndarray, texts: list[str] | None, passages: list[tuple[int, int]] | None = None
) -> list[dict[str, Any]]:
    """See `ranking`."""
    entries = []
    for i in np.argsort(-scores, kind="stable").tolist():
        text = {} if texts is None else {"text": texts[i]}
        span = {} if passages is None else dict(zip(("start", "end"), passages[i], strict=True))
        entries.append({"index": i, **text, "score": scores[i], **span})
    return entries


def predictions(engine: Engine, logits: np.ndarray, raw: bool) -> list[list[dict[str, Any]]]:
    """For each input the labels with their scores, the best first."""
    assert isinstance(engine.model, SequenceScorer)
    scores = logits if raw else engine.model.probabilities(torch.from_numpy(logits)).numpy()
    label_scores = []
    for row in scores:
        order = np.argsort(-row, kind="stable").tolist()
        label_scores.append([{"score": row[i], "label": engine.labels[i]} for i in order])
    return label_scores


def by_pipeline(entities: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entities of a text under the names of Hugging Face's pipelines."""
    names = {"label": "entity_group", "text": "word"}
    return [{names.get(name, name): value for name, value in one.items()} for one in entities]


def encoded(vectors: np.ndarray, encoding_format: str) -> Any:
    """As numbers, or as OpenAI has them in base64: float32, the low byte first."""
    if encoding_format == "base64":
        return [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    return vectors
