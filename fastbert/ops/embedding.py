"""embed_layer_norm: word + position + type lookups, LayerNorm, dropout (Devlin et al. 2018, section 3, figure 2)."""

from __future__ import annotations

import torch

from fastbert.backend import declare, select
from fastbert.ops import _torch

declare("embed_layer_norm")


def embed_layer_norm(
    input_ids: torch.Tensor | None,
    position_ids: torch.Tensor,
    token_type_ids: torch.Tensor | None,
    word: torch.Tensor,
    position: torch.Tensor,
    token_type: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    inputs_embeds: torch.Tensor | None = None,
    padding_idx: int | None = None,
    position_padding_idx: int | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-12,
    backend: str | None = None,
) -> torch.Tensor:
    """dropout(LayerNorm(word[input_ids] + token_type[token_type_ids] + position[position_ids])).

    Args:
        input_ids, position_ids, token_type_ids: int64 (total_tokens,); `token_type_ids` None means type 0.
        word (vocab_size, embedding_size), position, token_type: the tables; `token_type` None: the family has none.
        weight, bias: (embedding_size,); `weight` None skips the LayerNorm (pre-norm families).
        inputs_embeds: (total_tokens, embedding_size) in place of word[input_ids].
        padding_idx, position_padding_idx: rows of the word and position table that take no gradient.

    Returns:
        (total_tokens, embedding_size). Ids are not checked here: models check them at the API boundary.
    """
    select("embed_layer_norm", backend, position)
    return _torch.embed_layer_norm(
        input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias,
        inputs_embeds, padding_idx, position_padding_idx, dropout_p, eps,
    )  # fmt: skip
