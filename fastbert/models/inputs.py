"""The API boundary: every input is checked here, once, before the model launches anything."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastbert.config import EncoderConfig
from fastbert.models.family import Family
from fastbert.packing import IdRange, InputError, PackedBatch


@dataclass(frozen=True)
class PackedInputs:
    """A checked batch: ids are int64 (total_tokens,), or None."""

    batch: PackedBatch
    input_ids: torch.Tensor | None
    position_ids: torch.Tensor
    token_type_ids: torch.Tensor | None
    inputs_embeds: torch.Tensor | None


def prepare_inputs(
    family: Family,
    config: EncoderConfig,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    token_type_ids: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
) -> PackedInputs:
    """Check and pack what a user passed, padded (batch, seqlen) or packed (total_tokens,) with `cu_seqlens`.

    Raises InputError, naming the value and the limit.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise InputError("give exactly one of input_ids and inputs_embeds")
    given = input_ids if input_ids is not None else inputs_embeds
    assert given is not None
    grid = given.shape if input_ids is not None else given.shape[:-1]
    packed = cu_seqlens is not None
    if len(grid) != (1 if packed else 2):
        expected = "(total_tokens,), packed" if packed else "(batch, seqlen)"
        raise InputError(f"the input has shape {tuple(given.shape)}; its leading shape must be {expected}")
    if input_ids is not None and (input_ids.is_floating_point() or input_ids.dtype == torch.bool):
        raise InputError(f"input_ids is {input_ids.dtype}; it must be an integer tensor")
    if inputs_embeds is not None and inputs_embeds.shape[-1] != config.embedding_width:
        raise InputError(f"inputs_embeds has width {inputs_embeds.shape[-1]}; the model's is {config.embedding_width}")
    if not packed and 0 in grid:
        raise InputError(f"an empty batch: the input has shape {tuple(given.shape)}")
    if cu_seqlens is not None:
        if attention_mask is not None:
            raise InputError("attention_mask and cu_seqlens exclude each other: a packed batch has no padding")
        if cu_seqlens.device != given.device:
            raise InputError(f"cu_seqlens is on {cu_seqlens.device}; the input is on {given.device}")

    input_ids = None if input_ids is None else input_ids.long()
    token_type_ids = _like_input("token_type_ids", token_type_ids, grid, given.device)
    if token_type_ids is not None and family.embeddings.token_type is None:
        raise InputError(f"token_type_ids were given, but {config.model_type} has no token types")
    limit = config.max_position_embeddings - (_first_position(config) if family.positions_from_ids else 0)
    if position_ids is not None:
        if position_ids.dim() == 2 and position_ids.shape[0] == 1 and not packed:
            position_ids = position_ids.expand(grid)  # transformers takes one row for the whole batch
        position_ids = _like_input("position_ids", position_ids, grid, given.device)
    elif not packed:
        _check_length(grid[1], limit)

    tables = (
        ("input_ids", input_ids, config.vocab_size),
        ("token_type_ids", token_type_ids, config.type_vocab_size),
        ("position_ids", position_ids, config.max_position_embeddings),
    )
    ranges = [IdRange(name, ids, rows) for name, ids, rows in tables if ids is not None]
    if cu_seqlens is not None:
        batch = PackedBatch.from_cu_seqlens(cu_seqlens, max_seqlen, grid[0], ranges)
        if position_ids is None:
            _check_length(batch.max_seqlen, limit)
    else:
        batch = PackedBatch.from_mask(attention_mask, grid[0], grid[1], given.device, ranges)
    if position_ids is None and family.positions_from_ids:
        position_ids = _positions_from_ids(config, input_ids, grid, batch)

    def pack(t: torch.Tensor | None) -> torch.Tensor | None:
        return t if t is None or packed else batch.pack(t)

    positions = batch.local_positions() if position_ids is None else pack(position_ids)
    assert positions is not None
    return PackedInputs(batch, pack(input_ids), positions, pack(token_type_ids), pack(inputs_embeds))


def _check_length(longest: int, limit: int) -> None:
    if longest > limit:
        raise InputError(f"a sequence of {longest} tokens is longer than the position table, which has {limit}")


def _first_position(config: EncoderConfig) -> int:
    if config.pad_token_id is None:
        raise InputError(f"{config.model_type} counts positions from pad_token_id, which this config does not have")
    return config.pad_token_id + 1


def _positions_from_ids(config, input_ids, grid, batch: PackedBatch) -> torch.Tensor:
    """fairseq's rule: real ids count up from padding_idx + 1, pad ids get padding_idx; taken from ids, not the mask."""
    first = _first_position(config)
    if input_ids is None:
        return (
            batch.local_positions() + first
            if len(grid) == 1
            else (torch.arange(grid[1], device=batch.cu_seqlens.device) + first).expand(grid)
        )
    real = (input_ids != config.pad_token_id).long()
    count = real.cumsum(-1)
    if len(grid) == 1:  # packed: counting starts again with each sequence
        before = torch.nn.functional.pad(count, (1, 0))[batch.cu_seqlens.long()]
        token = torch.arange(grid[0], device=count.device)
        count = count - before[torch.searchsorted(batch.cu_seqlens[1:].long(), token, right=True)]
    return count * real + first - 1


def _like_input(name: str, ids: torch.Tensor | None, grid, device: torch.device) -> torch.Tensor | None:
    if ids is None:
        return None
    if ids.shape != grid:
        raise InputError(f"{name} has shape {tuple(ids.shape)}; the input's is {tuple(grid)}")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise InputError(f"{name} is {ids.dtype}; it must be an integer tensor")
    if ids.device != device:
        raise InputError(f"{name} is on {ids.device}; the input is on {device}")
    return ids.long()
