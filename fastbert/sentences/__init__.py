"""Text in, vectors or scores out: what stands beside sentence-transformers' SentenceTransformer and CrossEncoder."""

from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.reranker import Reranker

__all__ = ["Reranker", "SentenceEncoder"]
