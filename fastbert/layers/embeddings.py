"""The embedding leaves and their sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fastbert import ops
from fastbert.layers.encoder import add_norm
from fastbert.layers.leaves import get_leaf, is_norm, is_plain


@dataclass(frozen=True)
class EmbeddingNames:
    """Where the embedding leaves are, below the base model; None where the family has no such leaf.

    `order` is the order in which transformers registers them: an optimizer's saved state goes by it.
    """

    word: str = "embeddings.word_embeddings"
    position: str = "embeddings.position_embeddings"
    token_type: str | None = "embeddings.token_type_embeddings"
    norm: str | None = "embeddings.LayerNorm"
    project: str | None = None  # embedding_size -> hidden_size, after the dropout
    order: tuple[str, ...] = ("word", "position", "token_type", "norm", "project")


def run_embeddings(
    root: nn.Module,
    names: EmbeddingNames,
    input_ids: torch.Tensor | None,
    position_ids: torch.Tensor,
    token_type_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    dropout_p: float,
) -> torch.Tensor:
    """The packed embedding output (total_tokens, embedding_size), over the leaves of `root`, ours or Hugging Face's."""
    word, position = get_leaf(root, names.word), get_leaf(root, names.position)
    token_type = None if names.token_type is None else get_leaf(root, names.token_type)
    norm = None if names.norm is None else get_leaf(root, names.norm)
    if (
        is_plain(word, nn.Embedding)
        and is_plain(position, nn.Embedding)
        and (token_type is None or is_plain(token_type, nn.Embedding))
        and (norm is None or is_norm(norm))
    ):
        x = ops.embed_layer_norm(
            input_ids,
            position_ids,
            token_type_ids,
            word.weight,
            position.weight,
            None if token_type is None else token_type.weight,
            None if norm is None else norm.weight,
            None if norm is None else norm.bias,
            inputs_embeds=inputs_embeds,
            padding_idx=word.padding_idx,
            position_padding_idx=position.padding_idx,
            dropout_p=dropout_p,
            eps=0.0 if norm is None else norm.eps,
        )
    else:  # a leaf is hooked, or LoRA's: called, as every leaf is
        x = word(input_ids) if inputs_embeds is None else inputs_embeds
        if token_type is not None:
            x = x + token_type(torch.zeros_like(position_ids) if token_type_ids is None else token_type_ids)
        x = x + position(position_ids)
        x = x if norm is None else add_norm(norm, x, None, None, 0.0)
        x = ops.dropout(x, dropout_p)
    return x
