"""Tables and decoders with more words, or fewer: transformers' resize_token_embeddings."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def resize_rows(leaf: nn.Embedding | nn.Linear, rows: int, std: float | None) -> None:
    """Give a leaf `rows` rows, in place: the first stay as they are.

    New ones are drawn around the mean of the old (Hewitt 2021, "Initializing new word embeddings"); or, with `std`,
    from a normal distribution around 0. A Linear's new biases are drawn around the mean of the old, or are 0.
    """
    weight = leaf.weight
    leaf.weight = _parameter(_with_rows(weight, rows, std), weight)
    if isinstance(leaf, nn.Embedding):
        leaf.num_embeddings = rows
        if leaf.padding_idx is not None and leaf.padding_idx >= rows:
            leaf.padding_idx = None
        return
    leaf.out_features = rows
    if leaf.bias is not None:
        added = max(0, rows - leaf.bias.shape[0])
        mean, spread = float(leaf.bias.float().mean()), float(leaf.bias.float().std())
        more = leaf.bias.new_zeros(added) if std is not None else torch.normal(mean, 1e-9 * spread, (added,))
        leaf.bias = _parameter(torch.cat([leaf.bias[:rows], more.to(leaf.bias)]), leaf.bias)


def _parameter(values: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=like.requires_grad)


def _with_rows(weight: torch.Tensor, rows: int, std: float | None) -> torch.Tensor:
    old, added = weight.detach(), rows - weight.shape[0]
    if added <= 0:
        return old[:rows].clone()
    if std is not None:
        return torch.cat([old, old.new_empty(added, old.shape[1]).normal_(0.0, std)])
    wide = old.float()
    mean = wide.mean(0)
    covariance = 1e-9 * ((wide - mean).T @ (wide - mean) / old.shape[0])
    if torch.distributions.constraints.positive_definite.check(covariance).all():
        more = torch.distributions.MultivariateNormal(mean, covariance_matrix=covariance).sample((added,))
    else:  # fewer words than columns, for example
        more = mean.expand(added, -1)
    return torch.cat([old, more.to(old.dtype)])
