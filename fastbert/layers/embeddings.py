"""The embedding leaves and their sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from fastbert import ops
from fastbert.families.form import Embeddings
from fastbert.layers.encoder import add_norm
from fastbert.layers.leaves import get_leaf, is_plain, norm_kind, norm_weights


class EmbeddingIds(NamedTuple):
    """What is looked up, int64 (total_tokens,), or None; or inputs_embeds (total_tokens, embedding_size) for words."""

    input_ids: torch.Tensor | None
    position_ids: torch.Tensor | None
    token_type_ids: torch.Tensor | None
    task_type_ids: torch.Tensor | None
    inputs_embeds: torch.Tensor | None


def run_embeddings(root: nn.Module, names: Embeddings, ids: EmbeddingIds, dropout_p: float) -> torch.Tensor:
    """The packed embedding output (total_tokens, embedding_size), over the leaves of `root`, ours or Hugging Face's."""
    word = get_leaf(root, names.word)
    position = None if names.position is None else get_leaf(root, names.position)
    token_type = None if names.token_type is None else get_leaf(root, names.token_type)
    norm = None if names.norm is None else get_leaf(root, names.norm)
    kind = "none" if norm is None else norm_kind(norm)
    if (
        is_plain(word, nn.Embedding)
        and (position is None or is_plain(position, nn.Embedding))
        and (token_type is None or is_plain(token_type, nn.Embedding))
        and kind in ("none", "layer")
        and names.task_type is None
        and names.word_scaling is None
    ):
        weight, bias, eps = (None, None, 0.0) if norm is None else norm_weights(norm)
        return ops.embed_layer_norm(
            ids.input_ids,
            ids.position_ids,
            ids.token_type_ids,
            word.weight,
            None if position is None else position.weight,
            None if token_type is None else token_type.weight,
            weight,
            bias,
            inputs_embeds=ids.inputs_embeds,
            padding_idx=word.padding_idx,
            position_padding_idx=None if position is None else position.padding_idx,
            dropout_p=dropout_p,
            eps=eps,
        )
    # A leaf is hooked, or LoRA's, or the op does not have the sum: each is called, as every leaf is.
    x = word(ids.input_ids) if ids.inputs_embeds is None else ids.inputs_embeds
    zeros = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    if token_type is not None:
        x = x + token_type(zeros if ids.token_type_ids is None else ids.token_type_ids)
    if position is not None:
        x = x + position(ids.position_ids)
    if names.task_type is not None:
        x = x + get_leaf(root, names.task_type)(zeros if ids.task_type_ids is None else ids.task_type_ids)
    x = x if norm is None else add_norm(norm, x, None, None, 0.0)
    return ops.dropout(x, dropout_p)
