"""Text in, vectors, scores or probabilities out: what stands beside sentence-transformers' models and a pipeline."""

from fastbert.sentences.classifier import TextClassifier
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.reranker import Reranker
from fastbert.sentences.sparse_encoder import SparseEncoder

__all__ = ["Reranker", "SentenceEncoder", "SparseEncoder", "TextClassifier"]
