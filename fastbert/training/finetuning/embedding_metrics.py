"""How good vectors are: Spearman of cosines and scores, or how near the right text is among all others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

CHUNK = 1024  # anchors compared with all documents at a time


def spearman(vectors: torch.Tensor, columns: Sequence[np.ndarray], scores: np.ndarray) -> float:
    """The rank correlation of scores and cosines of pairs; `columns` are rows of `vectors`. Ties share their rank."""
    unit = F.normalize(vectors.double(), dim=-1)
    first, second = (unit[torch.from_numpy(column)] for column in columns)
    cosines = (first * second).sum(-1).numpy()
    return float(np.corrcoef(_ranks(cosines), _ranks(scores))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[which]


def ranks_metrics(vectors: torch.Tensor, columns: Sequence[np.ndarray]) -> dict[str, float]:
    """Among all texts of the columns but the first one, by cosine: how often the nearest one to an anchor is a
    positive of it, how often one of the nearest ten is, and the mean of 1 / the first positive's place (0 beyond 10).

    `columns` are rows of `vectors`: anchors, their positives, and any negatives. The same text is the same document,
    and no text is looked for by itself.
    """
    unit = F.normalize(vectors.float(), dim=-1)
    documents = np.unique(np.concatenate(columns[1:]))
    anchors, of_anchor = np.unique(columns[0], return_inverse=True)
    positives = np.searchsorted(documents, columns[1])
    ranks = []
    for start in range(0, len(anchors), CHUNK):
        rows = anchors[start : start + CHUNK]
        mine = (start <= of_anchor) & (of_anchor < start + CHUNK)
        is_right = torch.zeros(len(rows), len(documents), dtype=torch.bool)
        is_right[of_anchor[mine] - start, positives[mine]] = True
        is_itself = torch.from_numpy(rows[:, None] == documents[None, :])
        cosines = unit[rows] @ unit[documents].T
        best = cosines.masked_fill(~is_right, -2.0).amax(1, keepdim=True)
        ranks.append(1 + ((cosines > best) & ~is_right & ~is_itself).sum(1))
    rank = torch.cat(ranks).double()
    within = rank <= 10
    return {
        "accuracy_at_1": float((rank == 1).double().mean()),
        "accuracy_at_10": float(within.double().mean()),
        "mrr_at_10": float((within / rank).mean()),
    }
