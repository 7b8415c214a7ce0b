"""Similarities of vectors, and vectors in fewer bits or dimensions, as sentence-transformers defines them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F

from fastbert.errors import ConfigError, InputError
from fastbert.sentences.text_model import InferenceOptions

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
SIMILARITIES: tuple[str, ...] = get_args(Similarity)
PRECISIONS: tuple[str, ...] = get_args(Precision)


def similarity(a: Any, b: Any, name: str) -> torch.Tensor:
    """(n, dim), (m, dim) -> (n, m): how similar each of `a` is to each of `b`. A vector is a matrix of one row.

    Halves and integers are compared in float32.
    """
    a, b = _of_one_dtype(_matrix(a), _matrix(b))
    if name != "dot" or not (a.is_sparse and b.is_sparse):
        a, b = a.to_dense(), b.to_dense()
    if name == "cosine":
        return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T
    if name == "dot":
        return (torch.sparse.mm(a, b.T) if a.is_sparse else a @ b.T).to_dense()
    return -torch.cdist(a, b, p=2.0 if name == "euclidean" else 1.0)


def similarity_pairwise(a: Any, b: Any, name: str) -> torch.Tensor:
    """(n, dim), (n, dim) -> (n,): how similar each of `a` is to the one of `b` in its place."""
    a, b = _of_one_dtype(_tensor(a).to_dense(), _tensor(b).to_dense())
    if name == "cosine":
        return (F.normalize(a, dim=-1) * F.normalize(b, dim=-1)).sum(-1)
    if name == "dot":
        return (a * b).sum(-1)
    return -(torch.linalg.vector_norm(a - b, dim=-1) if name == "euclidean" else (a - b).abs().sum(-1))


def _tensor(vectors: Any) -> torch.Tensor:
    if isinstance(vectors, list):
        vectors = torch.stack([torch.as_tensor(vector) for vector in vectors])
    vectors = torch.as_tensor(vectors)
    return vectors if vectors.dtype is torch.float64 else vectors.float()


def _of_one_dtype(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The wider one of float32 and float64."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


class HasSimilarity:
    """What gives vectors, and knows how they are compared."""

    def similarity(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """(n, m): how similar each of n vectors, sparse or dense, is to each of m, by `similarity_fn_name`."""
        return similarity(embeddings1, embeddings2, self.similarity_fn_name)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """(n,): how similar each of n vectors is to the one in its place among n others, by `similarity_fn_name`."""
        return similarity_pairwise(embeddings1, embeddings2, self.similarity_fn_name)

    @property
    def similarity_fn_name(self) -> str:
        """cosine, dot, euclidean or manhattan; the last two are distances with a minus."""
        return self._similarity_fn_name

    @similarity_fn_name.setter
    def similarity_fn_name(self, name: Similarity | str | Enum) -> None:
        name = name.value if isinstance(name, Enum) else name  # a member of sentence-transformers' SimilarityFunction
        if name not in SIMILARITIES:
            raise ConfigError(f"unknown similarity {name!r}; there are {', '.join(SIMILARITIES)}")
        self._similarity_fn_name = name


class HasDimensions:
    """What gives vectors of `full_dim` numbers, of which callers get the first `truncate_dim`; None: all of them."""

    full_dim: int
    truncate_dim: int | None

    @property
    def dim(self) -> int:
        """How many numbers a vector has."""
        return self.full_dim if self.truncate_dim is None else min(self.truncate_dim, self.full_dim)

    def get_embedding_dimension(self) -> int:
        return self.dim

    get_sentence_embedding_dimension = get_embedding_dimension  # what releases before 6 called it

    @contextmanager
    def truncate_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """Vectors that are made meanwhile have the first `truncate_dim` numbers. Raises InputError for less than 1."""
        before, self.truncate_dim = self.truncate_dim, InferenceOptions(truncate_dim=truncate_dim).truncate_dim
        try:
            yield
        finally:
            self.truncate_dim = before

    truncate_sentence_embeddings = truncate_embeddings  # what releases before 6 called it


def _matrix(vectors: Any) -> torch.Tensor:
    vectors = _tensor(vectors)
    return vectors[None] if vectors.dim() == 1 else vectors


def in_precision(vectors: np.ndarray, precision: str) -> np.ndarray:
    """Vectors (n, dim) in integers.

    int8, uint8: each dimension in 256 steps between its smallest and its largest value among the n vectors, which are
    to be many. binary, ubinary: a bit a dimension, set above 0, eight of them in a byte.
    """
    if precision == "float32":
        return vectors
    if len(broken := np.flatnonzero(~np.isfinite(vectors).all(axis=-1))):
        raise InputError(
            f"vector {broken[0]} is not finite: no {precision} stands for it; precision='float32' shows it"
        )
    if precision.endswith("binary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits - 128).astype(np.int8)
    if len(vectors) == 1:
        raise InputError(
            f"precision {precision!r} goes by the range of many vectors, and there is one: encode many texts at once,"
            " or use 'float32' or 'binary'"
        )
    if not len(vectors):
        return np.zeros(vectors.shape, np.dtype(precision))
    low = vectors.min(axis=0)
    steps = (vectors.max(axis=0) - low) / 255
    steps = np.where(steps == 0, 1, steps)
    levels = np.clip(np.floor((vectors - low) / steps), 0, 255)
    return levels.astype(np.uint8) if precision == "uint8" else (levels - 128).astype(np.int8)
