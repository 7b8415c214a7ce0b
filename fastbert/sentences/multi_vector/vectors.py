"""Vectors of tokens, many texts' one after the other, and the scores of late interaction between them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from fastbert import ops
from fastbert.errors import InputError
from fastbert.files import writing

_FORMAT = "fastbert.TokenVectors"


@dataclass(frozen=True)
class TokenVectors:
    """The vectors of the tokens of texts: those of text i are rows cu_seqlens[i] to cu_seqlens[i + 1].

    vectors: float32 or bfloat16 (tokens, dim), or int8 with scales. cu_seqlens: int32 (texts + 1,). scales: float32
    (tokens,), by which the numbers of an int8 vector are multiplied.
    """

    vectors: torch.Tensor = field(repr=False)
    cu_seqlens: torch.Tensor
    scales: torch.Tensor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    def __getitem__(self, i: int) -> torch.Tensor:
        """Those of one text, (tokens, dim)."""
        i = range(len(self))[i]  # raises IndexError
        span = slice(int(self.cu_seqlens[i]), int(self.cu_seqlens[i + 1]))
        rows = self.vectors[span]
        return rows if self.scales is None else rows.float() * self.scales[span, None]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[i] for i in range(len(self)))

    @classmethod
    def of(cls, texts: Any) -> TokenVectors:
        """Of what an encoder gives, and sentence-transformers': a list of (tokens, dim), tensors or arrays; a padded
        (texts, tokens, dim), whose rows of zeros are no tokens; or one (tokens, dim). Raises InputError.
        """
        if isinstance(texts, TokenVectors):
            return texts
        if isinstance(texts, (torch.Tensor, np.ndarray)):
            t = torch.as_tensor(texts)
            if t.dim() == 2:
                return cls.of([t])
            if t.dim() != 3:
                raise InputError(
                    f"token vectors have shape {tuple(t.shape)}; (tokens, dim) and (texts, tokens, dim) go"
                )
            return cls.of_padded(t, (t != 0).any(-1))
        rows = [torch.as_tensor(one) for one in texts]
        widths = {tuple(one.shape[1:]) for one in rows if one.dim() != 2 or one.shape[0]}
        if len(widths) > 1 or any(len(width) != 1 for width in widths):
            raise InputError(f"token vectors of several shapes: {', '.join(sorted(map(str, widths)))}")
        (width,) = widths.pop() if widths else (1,)
        device = next((one.device for one in rows), None)
        kept = [one for one in rows if one.shape[0]]
        vectors = torch.cat(kept) if kept else torch.zeros(0, width, device=device)
        lengths = torch.tensor([0, *(one.shape[0] for one in rows)])
        return cls(vectors, lengths.cumsum(0).int().to(vectors.device))

    @classmethod
    def of_padded(cls, padded: torch.Tensor, mask: torch.Tensor | None) -> TokenVectors:
        """padded (texts, tokens, dim); mask (texts, tokens), 0 where there is no token."""
        texts, tokens, width = padded.shape
        if mask is None:
            offsets = torch.arange(0, texts * tokens + 1, max(1, tokens), dtype=torch.int32, device=padded.device)
            return cls(padded.reshape(-1, width), offsets if tokens else offsets.new_zeros(texts + 1))
        real = mask.to(padded.device) != 0
        offsets = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).int()
        return cls(padded[real], offsets)

    @classmethod
    def joined(cls, parts: Sequence[TokenVectors]) -> TokenVectors:
        """All of one or more in one."""
        lengths = torch.cat([part.cu_seqlens.diff() for part in parts])
        scales = [part.scales for part in parts if part.scales is not None]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        return cls(torch.cat([part.vectors for part in parts]), offsets, torch.cat(scales) if scales else None)

    def to(self, device: torch.device | str) -> TokenVectors:
        scales = None if self.scales is None else self.scales.to(device)
        return TokenVectors(self.vectors.to(device), self.cu_seqlens.to(device), scales)

    def in_int8(self) -> TokenVectors:
        """Each vector in whole numbers within +-127, and what one of them stands for."""
        if self.scales is not None:
            return self
        numbers, scales = ops.in_int8(self.vectors)
        return TokenVectors(numbers, self.cu_seqlens, scales)

    def select(self, texts: Sequence[int]) -> TokenVectors:
        """Those of some of the texts, in this order."""
        chosen = torch.as_tensor(texts, dtype=torch.int64, device=self.cu_seqlens.device)
        first, lengths = self.cu_seqlens[:-1].long()[chosen], self.cu_seqlens.diff().long()[chosen]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        within = torch.arange(int(offsets[-1]), device=first.device) - offsets[:-1].repeat_interleave(lengths)
        at = first.repeat_interleave(lengths) + within
        return TokenVectors(self.vectors[at], offsets.int(), None if self.scales is None else self.scales[at])

    def part(self, first: int, end: int) -> TokenVectors:
        """Those of texts [first, end), in the same memory."""
        begin, stop = int(self.cu_seqlens[first]), int(self.cu_seqlens[end])
        scales = None if self.scales is None else self.scales[begin:stop]
        return TokenVectors(self.vectors[begin:stop], self.cu_seqlens[first : end + 1] - begin, scales)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a .safetensors file. Raises InputError for another ending."""
        from safetensors.torch import save_file

        if Path(path).suffix != ".safetensors":
            raise InputError(f"{path}: the name must end in .safetensors")
        tensors = {"vectors": self.vectors.contiguous(), "cu_seqlens": self.cu_seqlens}
        tensors |= {} if self.scales is None else {"scales": self.scales}
        with writing(Path(path)) as new:
            save_file({name: t.detach().cpu() for name, t in tensors.items()}, new, {"format": _FORMAT})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TokenVectors:
        """What `save` has written, read from the file as it is needed: on the CPU. Raises InputError."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                kind = (file.metadata() or {}).get("format")
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: {error}") from None
        if kind != _FORMAT or set(tensors) - {"scales"} != {"vectors", "cu_seqlens"}:
            raise InputError(f"{path} holds {', '.join(tensors)}, and no vectors that TokenVectors.save has written")
        return cls(**tensors)

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(texts, longest, dim) with zeros behind each text, and which tokens are there, bool (texts, longest)."""
        rows = pad_sequence(list(self), batch_first=True)
        return rows, torch.arange(rows.shape[1], device=rows.device) < self.cu_seqlens.diff()[:, None]


def similarity(queries: Any, documents: Any, length_normalize: bool = False) -> torch.Tensor:
    """float32 (queries, documents): MaxSim (Khattab & Zaharia 2020, eq. 3), or with length_normalize its mean over the
    query's tokens. What stands for token vectors: see TokenVectors.of.
    """
    return _scores(TokenVectors.of(queries), TokenVectors.of(documents), None, length_normalize)


def similarity_pairwise(queries: Any, documents: Any, length_normalize: bool = False) -> torch.Tensor:
    """float32 (pairs,): of each query and the document in its place. Raises InputError for unequal numbers."""
    a, b = TokenVectors.of(queries), TokenVectors.of(documents)
    if len(a) != len(b):
        raise InputError(f"there are {len(a)} queries and {len(b)} documents; of pairs there are as many")
    each = torch.arange(len(a), device=b.vectors.device)
    return _scores(a, b, torch.stack([each, each]), length_normalize)


def _scores(
    queries: TokenVectors, documents: TokenVectors, pairs: torch.Tensor | None, length_normalize: bool
) -> torch.Tensor:
    rows = queries.vectors if queries.scales is None else queries.vectors.float() * queries.scales[:, None]
    vectors, device = documents.vectors, documents.vectors.device
    if not vectors.shape[0] or not rows.shape[0]:  # whose width is unknown
        width = max(rows.shape[1], vectors.shape[1])
        rows = rows if rows.shape[0] else rows.new_zeros(0, width)
        vectors = vectors if vectors.shape[0] else vectors.new_zeros(0, width)
    if rows.shape[1] != vectors.shape[1]:
        raise InputError(f"the vectors of queries have {rows.shape[1]} numbers, those of documents {vectors.shape[1]}")
    rows = rows if vectors.dtype is torch.int8 or rows.dtype is vectors.dtype else rows.to(vectors.dtype)
    return ops.maxsim(
        rows.to(device),
        queries.cu_seqlens.to(device),
        vectors,
        documents.cu_seqlens,
        pairs=pairs,
        scales=documents.scales,
        length_normalize=length_normalize,
    )


# --------------------------------------------------------------------------------------------------------------------
# For sentence-transformers' losses, whose `similarity_fct` they are: its arguments, in its layouts


def colbert_scores(
    queries_embeddings: torch.Tensor,
    documents_embeddings: torch.Tensor,
    queries_mask: torch.Tensor | None = None,
    documents_mask: torch.Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> torch.Tensor:
    """In the place of sentence-transformers' function of this name, for in-batch negatives; gradients go through.

    Args:
        queries_embeddings: (queries, tokens, dim). queries_mask: (queries, tokens).
        documents_embeddings: (groups, n, tokens, dim). documents_mask: (groups, n, tokens).
        chunk_elements: of no use: nothing of tokens x tokens is written.
        length_normalize: the mean over the query's tokens.

    Returns:
        float32 (queries, groups * n), a group's documents beside each other.
    """
    documents = _flat(documents_embeddings, documents_mask)
    return _scores(TokenVectors.of_padded(queries_embeddings, queries_mask), documents, None, length_normalize)


def colbert_scores_pairwise(
    queries_embeddings: torch.Tensor,
    documents_embeddings: torch.Tensor,
    queries_mask: torch.Tensor | None = None,
    documents_mask: torch.Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> torch.Tensor:
    """The same of matched pairs, both (pairs, tokens, dim): float32 (pairs,)."""
    queries = TokenVectors.of_padded(queries_embeddings, queries_mask)
    return similarity_pairwise(queries, TokenVectors.of_padded(documents_embeddings, documents_mask), length_normalize)


def colbert_kd_scores(
    queries_embeddings: torch.Tensor,
    documents_embeddings: torch.Tensor,
    queries_mask: torch.Tensor | None = None,
    documents_mask: torch.Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> torch.Tensor:
    """The same of each query with its own n documents (queries, n, tokens, dim), for distillation: (queries, n)."""
    batch, ways = documents_embeddings.shape[:2]
    query = torch.arange(batch, device=documents_embeddings.device).repeat_interleave(ways)
    pairs = torch.stack([query, torch.arange(batch * ways, device=query.device)])
    queries = TokenVectors.of_padded(queries_embeddings, queries_mask)
    scores = _scores(queries, _flat(documents_embeddings, documents_mask), pairs, length_normalize)
    return scores.view(batch, ways)


def _flat(documents: torch.Tensor, mask: torch.Tensor | None) -> TokenVectors:
    return TokenVectors.of_padded(documents.flatten(0, 1), None if mask is None else mask.flatten(0, 1))
