"""Batches by a number of tokens: what a model computes at a time, for vectors, scores, labels and evaluation alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

# Tokens in one batch. CPU, measured (all-MiniLM-L6-v2, 430 texts of 5 to 180 tokens, processor seconds on one Zen 5
# core, fp32 / bf16): 512 3.30 / 1.25, 1024 3.24 / 1.17, 2048 3.28 / 1.14, 4096 3.39 / 1.19, 16384 3.80 / 1.38. Fewer do
# not fill the products; more leave the cache between one op and the next. A GPU needs many to hide its launches (this
# one is not measured).
_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


def batch_tokens_of(device: torch.device) -> int:
    """How many tokens in a batch a device is fastest with."""
    return _BATCH_TOKENS["cpu" if device.type == "cpu" else "cuda"]


def token_batches(
    lengths: Sequence[int] | np.ndarray, batch_tokens: int, batch_size: int | None = None
) -> Iterator[list[int]]:
    """Indices of sequences, longest first, in groups of at most `batch_tokens` tokens, or of one sequence.

    `batch_size`: a group has no more sequences either.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    ends, start, before = np.cumsum(np.asarray(lengths, np.int64)[order]), 0, 0
    while start < len(order):
        stop = max(start + 1, int(np.searchsorted(ends, before + batch_tokens, "right")))
        stop = stop if batch_size is None else min(stop, start + batch_size)
        yield order[start:stop].tolist()
        start, before = stop, int(ends[stop - 1])
