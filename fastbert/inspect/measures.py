"""Numbers of attention probabilities: what a head looks at, and what reaches the top of a stack of layers."""

from __future__ import annotations

from collections.abc import Collection

import torch

# What measure_heads gives of each head, in this order.
HEAD_MEASURES = ("entropy", "distance", "first", "separators", "itself", "previous", "next")


def measure_heads(probs: torch.Tensor, separators: Collection[int] = ()) -> torch.Tensor:
    """What the heads of one text look at, as means over its tokens (Clark et al. 2019, section 3).

    Args:
        probs: (..., heads, tokens, tokens), each row a query's probabilities.
        separators: the places of [SEP] tokens.

    Returns:
        (..., heads, 7), in the dtype of probs, in the order of HEAD_MEASURES: the entropy of a row, in nats; how many
        tokens away it looks, on average; its share on the first token ([CLS]), on separators, on the token itself, on
        the one before and on the one behind it, of which the first and the last token have none.

    Raises:
        ValueError: probs has no rows as long as they are many, or a separator is no token.
    """
    tokens = probs.shape[-1]
    if probs.dim() < 3 or probs.shape[-2] != tokens or tokens == 0:
        raise ValueError(f"probs has shape {tuple(probs.shape)}, expected (..., heads, tokens, tokens)")
    if any(not 0 <= i < tokens for i in separators):
        raise ValueError(f"separators are {sorted(separators)}; the text has {tokens} tokens")
    places = torch.arange(tokens, device=probs.device)
    distances = (places[:, None] - places).abs().to(probs.dtype)
    entropy = -torch.special.xlogy(probs, probs).sum(-1).mean(-1)
    distance = (probs * distances).sum(-1).mean(-1)
    columns = torch.tensor(sorted(separators), dtype=torch.long, device=probs.device)
    of_separators = probs[..., columns].sum(-1).mean(-1)
    near = [probs.diagonal(step, -2, -1).sum(-1) / tokens for step in (0, -1, 1)]
    return torch.stack([entropy, distance, probs[..., 0].mean(-1), of_separators, *near], -1)


def rollout(probs: torch.Tensor) -> torch.Tensor:
    """Attention rollout (Abnar & Zuidema 2020, section 3): how much of each token's input reaches each token.

    Half of what a layer passes on is its residual, the other half the mean of its heads; the layers are multiplied.

    Args:
        probs: (layers, heads, tokens, tokens), of all layers from the first on.

    Returns:
        (layers, tokens, tokens): after each layer, rows that add up to 1.

    Raises:
        ValueError: probs has another number of dimensions.
    """
    if probs.dim() != 4 or probs.shape[-1] != probs.shape[-2]:
        raise ValueError(f"probs has shape {tuple(probs.shape)}, expected (layers, heads, tokens, tokens)")
    mixed = 0.5 * probs.mean(1) + 0.5 * torch.eye(probs.shape[-1], dtype=probs.dtype, device=probs.device)
    passed = [mixed[0]]
    for layer in mixed[1:]:
        passed.append(layer @ passed[-1])
    return torch.stack(passed)
