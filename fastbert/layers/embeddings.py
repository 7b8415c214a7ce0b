"""The embedding leaves and their sum."""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import torch
from torch import nn

from fastbert import ops
from fastbert.families.schema import Embeddings, TokenDropout
from fastbert.layers.encoder import add_norm
from fastbert.layers.leaves import get_leaf, is_plain, linear
from fastbert.layers.norms import norm_type_of, norm_weights
from fastbert.ops._common import needs_grad
from fastbert.ops.packing import token_sequences


class ScaledEmbedding(nn.Embedding):
    """A table whose rows are multiplied by `scale`: Embeddings.word_scale."""

    def __init__(self, rows: int, width: int, scale: float, padding_idx: int | None = None):
        super().__init__(rows, width, padding_idx=padding_idx)
        self.scale = scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        ids, padding = input_ids.reshape(-1), self.padding_idx
        rows = ops.embed_layer_norm(ids, None, None, self.weight, None, None, None, None, padding_idx=padding)
        # Rounded to float32 first, as transformers keeps it.
        scale = torch.tensor(self.scale, dtype=torch.float32, device=rows.device).to(rows.dtype)
        return rows.mul_(scale).view(*input_ids.shape, self.embedding_dim)


class EmbeddingIds(NamedTuple):
    """What is looked up, int64 (total_tokens,), or None; or inputs_embeds (total_tokens, embedding_size) for words."""

    input_ids: torch.Tensor | None
    position_ids: torch.Tensor | None
    token_type_ids: torch.Tensor | None
    task_type_ids: torch.Tensor | None
    inputs_embeds: torch.Tensor | None


def run_embeddings(
    root: nn.Module, names: Embeddings, ids: EmbeddingIds, dropout_p: float, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """The packed embedding output (total_tokens, its width), over the leaves of `root`, ours or Hugging Face's."""
    embeds = ids.inputs_embeds
    if embeds is not None and names.skips_given:
        return embeds
    word = get_leaf(root, names.word)
    position = None if names.position is None else get_leaf(root, names.position)
    token_type = None if names.token_type is None else get_leaf(root, names.token_type)
    for path in (names.word, names.position, names.token_type, names.task_type):
        if path is not None:
            _check_counts(get_leaf(root, path), path)
    norm = None if names.norm is None else get_leaf(root, names.norm)
    projection = get_leaf(root, names.project) if names.project is not None and names.projects_first else None

    def ended(x):
        x = x if projection is None else linear(projection, x)
        x = x if norm is None else add_norm(norm, x, None, None, 0.0)
        return ops.dropout(x, dropout_p)

    if embeds is None and names.token_dropout is not None:
        embeds = _without_masked(word(ids.input_ids), ids.input_ids, names.token_dropout, cu_seqlens)
    if names.task_type is not None:  # the op has no such table: it gets the sum in the place of words
        embeds = word(ids.input_ids) if embeds is None else embeds
        tasks = ids.task_type_ids
        tasks = embeds.new_zeros(embeds.shape[0], dtype=torch.int64) if tasks is None else tasks
        embeds = embeds + get_leaf(root, names.task_type)(tasks)
    norm_type = "none" if norm is None or projection is not None else norm_type_of(norm)
    if (
        is_lookup(word)
        and (position is None or (is_lookup(position) and not position.sparse))
        and (token_type is None or (is_lookup(token_type) and not token_type.sparse))
        and not (word.sparse and torch.compiler.is_compiling())  # torch's compilers know nothing of such gradients
        and norm_type in ("none", "layer")
    ):
        weight, bias, eps = (None, None, 0.0) if norm is None or norm_type == "none" else norm_weights(norm)
        x = ops.embed_layer_norm(
            ids.input_ids if embeds is None else None,
            ids.position_ids,
            ids.token_type_ids,
            word.weight,
            None if position is None else position.weight,
            None if token_type is None else token_type.weight,
            weight,
            bias,
            inputs_embeds=embeds,
            padding_idx=word.padding_idx,
            position_padding_idx=None if position is None else position.padding_idx,
            dropout_p=0.0 if projection is not None else dropout_p,
            eps=eps,
            sparse=word.sparse,
        )
        return x if projection is None else ended(x)
    # A leaf is hooked, or LoRA's, or the op does not have the sum: each is called, as every leaf is.
    x = word(ids.input_ids) if embeds is None else embeds
    if token_type is not None:
        types = ids.token_type_ids
        x = x + token_type(x.new_zeros(x.shape[0], dtype=torch.int64) if types is None else types)
    if position is not None:
        x = x + position(ids.position_ids)
    return ended(x)


def _check_counts(leaf: nn.Module, path: str) -> None:
    """It is unknown here how often a padded batch looks a row up: padding counts, and columns share their positions."""
    if isinstance(leaf, nn.Embedding) and leaf.scale_grad_by_freq and needs_grad(leaf.weight):
        raise ValueError(
            f"{path} has scale_grad_by_freq=True: its gradient goes by how often a padded batch looks a row up, padding"
            " included, and packed tokens have no padding. Set it to False, or train transformers' model"
        )


def is_lookup(leaf: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether the op does all that calling a leaf does: max_norm changes the table."""
    return is_plain(leaf, nn.Embedding) and leaf.max_norm is None


def _without_masked(
    words: torch.Tensor, input_ids: torch.Tensor | None, spec: TokenDropout, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """What TokenDropout makes of words (total_tokens, embedding_size)."""
    is_mask = input_ids == spec.mask_token_id
    assert isinstance(is_mask, torch.Tensor)
    before = torch.nn.functional.pad(is_mask.cumsum(0), (1, 0))[cu_seqlens.long()]
    kept = 1 - before.diff().float() / cu_seqlens.diff().clamp(min=1)
    sequence, _ = token_sequences(cu_seqlens, words.shape[0])
    kept = kept.where(kept > 0, 1.0).index_select(0, sequence)[:, None]
    scaled = ops.at_least_fp32(words).masked_fill(is_mask[:, None], 0.0) * (1 - spec.share) / kept
    return scaled.to(words.dtype)
