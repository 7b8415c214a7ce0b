"""What the vectors of texts are trained by, with the numbers of sentence-transformers' losses of the same names.

All of them take vectors (examples, texts of an example, dim), which need not be of length 1, and run in float32; and
is_real, bool (examples,): the others are padding, which enters no mean and is no example's negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fastbert import ops


def ranking(vectors: torch.Tensor, is_real: torch.Tensor, scale: float, symmetric: bool) -> torch.Tensor:
    """MultipleNegativesRankingLoss: each first text has to find its second one among those of all examples, and among
    their further texts, which are negatives (Henderson et al. 2017, section 4.4), by cosine times `scale`.

    `symmetric`: and each second text its first one; the mean of both.
    """
    unit = F.normalize(vectors.float(), dim=-1)
    anchors, documents = unit[:, 0], unit[:, 1:].transpose(0, 1).flatten(0, 1)  # all second texts, all third ones, ...
    own = torch.arange(len(unit), device=unit.device).where(is_real, -100)

    def find(texts: torch.Tensor, among: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
        return ops.logits_cross_entropy((scale * texts @ among.T).masked_fill(~is_real, -math.inf), own)

    loss = find(anchors, documents, is_real.repeat(vectors.shape[1] - 1))
    return (loss + find(unit[:, 1], anchors, is_real)) / 2 if symmetric else loss


def cosent(vectors: torch.Tensor, is_real: torch.Tensor, scores: torch.Tensor, scale: float) -> torch.Tensor:
    """CoSENTLoss: log(1 + the sum of exp(scale * (cosine of i - cosine of j)) over all i whose score is below j's)."""
    cosines = scale * _cosines(vectors)
    differences = cosines[:, None] - cosines[None, :]
    is_wrong = (scores[:, None] < scores[None, :]) & is_real[:, None] & is_real[None, :]
    # All pairs, of which those that are right add nothing: how many are wrong is a wait on a GPU.
    terms = torch.where(is_wrong, differences, -math.inf).flatten()
    return torch.logsumexp(torch.cat([cosines.new_zeros(1), terms]), 0)


def cosine(vectors: torch.Tensor, is_real: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """CosineSimilarityLoss: the mean square of what is between the cosine and the score."""
    squares = F.mse_loss(_cosines(vectors), scores.float(), reduction="none")
    return squares.where(is_real, 0.0).sum() / is_real.sum().clamp(min=1)


def _cosines(vectors: torch.Tensor) -> torch.Tensor:
    unit = F.normalize(vectors.float(), dim=-1)
    return (unit[:, 0] * unit[:, 1]).sum(-1)


def over_prefixes(
    loss: Callable[[torch.Tensor], torch.Tensor], vectors: torch.Tensor, dims: Sequence[int]
) -> torch.Tensor:
    """MatryoshkaLoss: the sum of the losses of the first numbers of each vector, so many as `dims` say (Kusupati et al.
    2022); without `dims` that of the vectors.
    """
    if not dims:
        return loss(vectors)
    return torch.stack([loss(vectors[..., :dim]) for dim in dims]).sum()


def of_all_ranks(values: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, rank after rank; gradients go to this rank's own. Ranks may have other numbers of rows."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    size, rank = dist.get_world_size(), dist.get_rank()
    count = torch.tensor([len(values)], device=values.device)
    counts = [torch.zeros_like(count) for _ in range(size)]
    dist.all_gather(counts, count)
    most = int(max(counts))
    padded = values.detach().new_zeros(most, *values.shape[1:])
    padded[: len(values)] = values.detach()
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded)
    rows = [one[: int(n)] for one, n in zip(gathered, counts, strict=True)]
    rows[rank] = values
    return torch.cat(rows)
