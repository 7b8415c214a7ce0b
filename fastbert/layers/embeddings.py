"""The embedding leaves and their sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fastbert import ops
from fastbert.layers.leaves import get_leaf, is_plain, linear


@dataclass(frozen=True)
class EmbeddingNames:
    """Where the embedding leaves are, below the base model; None where the family has no such leaf."""

    word: str = "embeddings.word_embeddings"
    position: str = "embeddings.position_embeddings"
    token_type: str | None = "embeddings.token_type_embeddings"
    norm: str | None = "embeddings.LayerNorm"
    project: str | None = None  # embedding_size -> hidden_size


def run_embeddings(
    root: nn.Module,
    names: EmbeddingNames,
    input_ids: torch.Tensor | None,
    position_ids: torch.Tensor,
    token_type_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    dropout_p: float,
) -> torch.Tensor:
    """The packed embedding output (total_tokens, hidden_size), over the leaves of `root`, ours or Hugging Face's."""
    word, position = get_leaf(root, names.word), get_leaf(root, names.position)
    token_type = None if names.token_type is None else get_leaf(root, names.token_type)
    norm = None if names.norm is None else get_leaf(root, names.norm)
    if inputs_embeds is None and not is_plain(word, nn.Embedding):
        inputs_embeds = word(input_ids)
    fused = norm is None or is_plain(norm, nn.LayerNorm)
    x = ops.embed_layer_norm(
        input_ids,
        position_ids,
        token_type_ids,
        None if inputs_embeds is not None else word.weight,
        position.weight,
        None if token_type is None else token_type.weight,
        norm.weight if fused and norm is not None else None,
        norm.bias if fused and norm is not None else None,
        inputs_embeds=inputs_embeds,
        padding_idx=None if inputs_embeds is not None else word.padding_idx,
        position_padding_idx=position.padding_idx,
        dropout_p=dropout_p if fused else 0.0,
        eps=norm.eps if fused and norm is not None else 0.0,
    )
    if not fused:
        x = nn.functional.dropout(norm(x), dropout_p) if dropout_p > 0 else norm(x)
    return x if names.project is None else linear(get_leaf(root, names.project), x)
