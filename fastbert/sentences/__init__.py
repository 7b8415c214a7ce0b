"""Text in, vectors, scores or probabilities out: what stands beside sentence-transformers' models and a pipeline.

The classes are imported when they are first used: one of them brings the heads of masked LMs along, which few need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastbert.sentences.classifier import TextClassifier
    from fastbert.sentences.encoder import SentenceEncoder
    from fastbert.sentences.multi_vector.encoder import MultiVectorEncoder
    from fastbert.sentences.reranker import Reranker
    from fastbert.sentences.sparse_encoder import SparseEncoder

__all__ = ["MultiVectorEncoder", "Reranker", "SentenceEncoder", "SparseEncoder", "TextClassifier"]

_HOMES = {
    "MultiVectorEncoder": "multi_vector.encoder",
    "Reranker": "reranker",
    "SentenceEncoder": "encoder",
    "SparseEncoder": "sparse_encoder",
    "TextClassifier": "classifier",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
