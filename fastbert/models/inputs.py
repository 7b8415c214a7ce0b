"""The API boundary: every input is checked here, once, before the model launches anything."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fastbert.config import EncoderConfig
from fastbert.errors import InputError
from fastbert.execution.request import EncoderInputs
from fastbert.layers.adapters import hook_by_place, layer_by_place
from fastbert.layers.embeddings import EmbeddingIds
from fastbert.layers.leaves import get_leaf
from fastbert.ops.packing import token_sequences
from fastbert.packed_inputs import MASKED_IDS, ModelInputs
from fastbert.packing import IdRange, PackedBatch

# What an encoder ignores, as in transformers: a cache is the decoder's, the Trainer's count of items the loss's, and
# sentence-transformers leaves its results in features, and hands them on when they go through a model again.
IGNORED = frozenset(
    {
        "token_embeddings",
        "sentence_embedding",
        "scores",
        "all_layer_embeddings",
        "token_weights_sum",
        "use_cache",
        "num_items_in_batch",
    }
)


_CLEARED = "clears what it has of tokens that are masked: they cannot attend to others"


def check_tensors(arguments: Mapping[str, Any]) -> None:
    """Raises InputError where an argument that stands for a tensor is something else: a text, a list, an array."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, torch.Tensor):
            first = next(iter(value), None) if isinstance(value, (list, tuple)) else value
            is_text = name == "input_ids" and isinstance(first, str)
            hint = ": a tokenizer makes ids of texts, and SentenceEncoder.encode takes texts themselves"
            raise InputError(f"{name} is a {type(value).__name__}; it must be a tensor{hint if is_text else ''}")


def taken(options: dict[str, Any], names: tuple[str, ...], model: nn.Module) -> dict[str, Any]:
    """Those of a call's further arguments that are given, without what is ignored. Raises TypeError for names that are
    not among `names`.
    """
    passed = {name: value for name, value in options.items() if value is not None and name not in IGNORED}
    if unknown := sorted(passed.keys() - set(names)):
        has = f"; it has {', '.join(names)}" if names else ""
        raise TypeError(f"{type(model).__name__} takes no {', '.join(unknown)}{has}")
    return passed


class TableSizes(NamedTuple):
    """The rows of the tables, and the width of a row of the embeddings'; None: there is no table of these positions.

    rotary_positions: of the one that rotary embedding reads, where the family saves it.
    """

    words: int
    positions: int | None
    token_types: int
    width: int
    task_types: int = 0
    rotary_positions: int | None = None

    @property
    def has_types(self) -> bool:
        """Whether a model is to be told which token is of which text. A table of one row, RoBERTa's, says nothing, and
        its tokenizers count no texts.
        """
        return self.token_types > 1

    def longest(self, config: EncoderConfig) -> int | None:
        """The longest sequence, in tokens, that the position table has room for; None where there is none."""
        if self.positions is None:
            return self.rotary_positions
        return max(0, self.positions - (_first_position(config) if config.family.positions_from_ids else 0))


def table_sizes(root: nn.Module, running: EncoderConfig, config: Any) -> TableSizes:
    """Those of the tables below `root` as they are now: tables are resized and replaced behind a config's back.

    `running` says which tables there are. `config` (the same, or transformers' config object) speaks for a leaf that
    has no table to look at: one that is not nn.Embedding (LoRA's, a user's own), or that computes its weight. Such a
    leaf is called, and what it cannot look up it refuses by itself.
    """
    rotary_positions = None
    for rotary in running.rotaries:
        if rotary.table is not None:
            table = _shape_of(root, rotary.table)
            rotary_positions = config.max_position_embeddings if table is None else table[0]
    return embedding_sizes(root, running, config)._replace(rotary_positions=rotary_positions)


def embedding_sizes(root: nn.Module, running: EncoderConfig, config: Any) -> TableSizes:
    """`table_sizes` of the embeddings alone."""
    names, width = running.embeddings, running.embedding_width
    words, num_positions, token_types = _shape_of(root, names.word), None, 0
    columns = words
    if names.position is not None:
        columns = _shape_of(root, names.position)
        num_positions = config.max_position_embeddings if columns is None else columns[0]
    if names.token_type is not None:
        types = _shape_of(root, names.token_type)
        token_types = config.type_vocab_size if types is None else types[0]
    task_types = None
    if names.task_type is not None:
        tasks = _shape_of(root, names.task_type)
        task_types = config.task_type_vocab_size if tasks is None else tasks[0]
    return TableSizes(
        config.vocab_size if words is None else words[0],
        num_positions,
        token_types,
        width if columns is None else columns[1],
        task_types or 0,
    )


def _shape_of(root: nn.Module, path: str) -> torch.Size | None:
    leaf = get_leaf(root, path)
    weight = leaf._parameters.get("weight") if isinstance(leaf, nn.Embedding) else None
    return weight.shape if weight is not None and weight.dim() == 2 else None


def prepare_inputs(
    config: EncoderConfig,
    tables: TableSizes,
    arguments: ModelInputs,
    labels: torch.Tensor | None = None,
    has_padding: bool | None = None,
    query_only: torch.Tensor | None = None,
) -> EncoderInputs:
    """Check and pack what a user passed: padded (batch, seqlen); or packed, (total_tokens,), with offsets or a batch.

    Ids are checked against `tables`, whatever `config` says of them; where `batch` knows their bounds, the device is
    not waited for. `labels`, `has_padding` and `query_only`: as PackedBatch.from_mask has them. Raises InputError, and
    names the value and the limit.
    """
    values, grid, packed = _check_values(arguments, tables)
    attention_mask, cu_seqlens, batch = arguments.attention_mask, arguments.cu_seqlens, arguments.batch
    if batch is not None:
        _check_batch(
            batch, values, grid, attention_mask=attention_mask, cu_seqlens=cu_seqlens, max_seqlen=arguments.max_seqlen
        )
    if cu_seqlens is not None:
        _check_offsets(cu_seqlens, attention_mask, values.device)

    input_ids = None if arguments.input_ids is None else arguments.input_ids.long()
    token_type_ids, task_type_ids = _check_types(config, arguments, grid, values.device)
    limit = tables.longest(config)
    if arguments.inputs_embeds is not None and config.embeddings.skips_given and tables.rotary_positions is None:
        limit = None  # nothing looks positions up
    position_ids = _check_positions(arguments.position_ids, grid, packed, values.device)
    width = batch.seqlen if batch is not None else None if packed else grid[1]
    if position_ids is None and width is not None:
        _check_length(width, limit)

    rows_of = (
        ("input_ids", input_ids, tables.words),
        ("token_type_ids", token_type_ids, tables.token_types),
        ("task_type_ids", task_type_ids, tables.task_types),
        ("position_ids", position_ids, tables.rotary_positions if tables.positions is None else tables.positions),
    )
    # Without a table any position does: rotary embedding turns by it.
    ranges = [IdRange(name, ids, 2**31 - 1 if rows is None else rows) for name, ids, rows in rows_of if ids is not None]
    if batch is not None:
        batch.check(ranges)
        batch = replace(batch, cache={})  # the caller's may come back, with other tensors in use
    elif cu_seqlens is not None:
        batch = PackedBatch.from_cu_seqlens(cu_seqlens, arguments.max_seqlen, grid[0], ranges)
    else:
        known = (ranges, labels, has_padding, query_only)
        batch = PackedBatch.from_mask(attention_mask, grid[0], grid[1], values.device, *known)
    if batch.num_keys is not None and not config.family.masked_tokens_attend:
        raise InputError(f"query_only_mask: {config.model_type} {_CLEARED}")
    if position_ids is None and batch.seqlen is None:
        _check_length(batch.max_seqlen, limit)
    if position_ids is None and config.family.positions_from_ids and limit is not None:
        _check_masked(config, batch)
        position_ids = _positions_from_ids(config, input_ids, grid, batch)

    def pack(t: torch.Tensor | None) -> torch.Tensor | None:
        return t if t is None or packed else batch.pack(t)

    given_positions = pack(position_ids)
    positions = given_positions
    if tables.positions is not None and positions is None:
        positions = batch.local_positions()
    ids = EmbeddingIds(
        pack(input_ids), positions, pack(token_type_ids), pack(task_type_ids), pack(arguments.inputs_embeds)
    )
    if config.distances is None:
        return EncoderInputs(batch, ids)
    columns = batch.columns_with_gaps(config.distances.are_absolute)
    return EncoderInputs(batch, ids, columns if given_positions is None else given_positions, columns)


def _check_positions(
    position_ids: torch.Tensor | None, grid: torch.Size, packed: bool, device: torch.device
) -> torch.Tensor | None:
    if position_ids is None:
        return None
    if position_ids.dim() == 2 and position_ids.shape[0] == 1 and not packed:
        position_ids = position_ids.expand(grid)  # transformers takes one row for the whole batch
    return _like_input("position_ids", position_ids, grid, device)


def _check_offsets(cu_seqlens: torch.Tensor, attention_mask: torch.Tensor | None, device: torch.device) -> None:
    if attention_mask is not None:
        raise InputError("attention_mask and cu_seqlens exclude each other: a packed batch has no padding")
    if cu_seqlens.device != device:
        raise InputError(f"cu_seqlens is on {cu_seqlens.device}; the input is on {device}")


def _check_values(arguments: ModelInputs, tables: TableSizes) -> tuple[torch.Tensor, torch.Size, bool]:
    """Ids or embeddings, their leading shape, and whether they are packed. Raises InputError."""
    input_ids, inputs_embeds, batch = arguments.input_ids, arguments.inputs_embeds, arguments.batch
    check_tensors(arguments.tensors())
    if batch is not None and not isinstance(batch, PackedBatch):
        raise InputError(f"batch is a {type(batch).__name__}; it must be the PackedBatch of a PackedInputs")
    if (input_ids is None) == (inputs_embeds is None):
        raise InputError("give exactly one of input_ids and inputs_embeds")
    values: Any = input_ids if input_ids is not None else inputs_embeds  # one of them is there
    grid = values.shape if input_ids is not None else values.shape[:-1]
    packed = arguments.cu_seqlens is not None or batch is not None
    if len(grid) != (1 if packed else 2):
        expected = "(total_tokens,), packed" if packed else "(batch, seqlen)"
        raise InputError(f"the input has shape {tuple(values.shape)}; its leading shape must be {expected}")
    if input_ids is not None and (input_ids.is_floating_point() or input_ids.dtype == torch.bool):
        raise InputError(f"input_ids is {input_ids.dtype}; it must be an integer tensor")
    if inputs_embeds is not None and inputs_embeds.shape[-1] != tables.width:
        raise InputError(f"inputs_embeds has width {inputs_embeds.shape[-1]}; the model's is {tables.width}")
    if not packed and 0 in grid:
        raise InputError(f"an empty batch: the input has shape {tuple(values.shape)}")
    return values, grid, packed


def _check_types(
    config: EncoderConfig, arguments: ModelInputs, grid: torch.Size, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The token types and task types that this config has a use for. Raises InputError."""
    token_type_ids, task_type_ids = arguments.token_type_ids, arguments.task_type_ids
    if config.embeddings.token_type is None and config.family.ignores_types:
        token_type_ids = None
    token_type_ids = _like_input("token_type_ids", token_type_ids, grid, device)
    if token_type_ids is not None and config.embeddings.token_type is None:
        raise InputError(f"token_type_ids were given, but {config.model_type} has no token types")
    if config.embeddings.task_type is None and "task_type_vocab_size" in config.own:
        task_type_ids = None  # as in transformers: the family takes them, and this config has no use for them
    task_type_ids = _like_input("task_type_ids", task_type_ids, grid, device)
    if task_type_ids is not None and config.embeddings.task_type is None:
        raise InputError(f"task_type_ids were given, but {config.model_type} has no task types")
    return token_type_ids, task_type_ids


def _check_batch(batch: PackedBatch, values: torch.Tensor, grid, **others: Any) -> None:
    for name, value in others.items():
        if value is not None:
            raise InputError(f"{name} and batch exclude each other: a PackedBatch says which tokens there are")
    if grid[0] != batch.total_tokens:
        raise InputError(f"the input has {grid[0]} tokens; its batch has {batch.total_tokens}")
    if batch.cu_seqlens.device != values.device:
        raise InputError(f"the batch is on {batch.cu_seqlens.device}; the input is on {values.device}")


def refuse_others(root: nn.Module, is_padded: bool) -> None:
    """Raises InputError where somebody waits for what only a padded batch has: code that goes by a token's row or
    column, or what records it.
    """
    config: EncoderConfig = root.config  # type: ignore[assignment]
    word = get_leaf(root, config.embeddings.word)
    # PEFT's tuners may be anywhere, and the Trainer's NEFTune is at the table of words alone.
    for module in root.modules() if "peft" in sys.modules else (word,):
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        reason = next(filter(None, [layer_by_place(module), *map(hook_by_place, hooks)]), None)
        if reason is not None:
            raise InputError(
                f"{reason}, and fastbert's classes pack their batches: use transformers' class and fastbert.accelerate"
            )
    _refuse_recording(is_padded)


def _refuse_recording(is_padded: bool) -> None:
    """Raise InputError where a recorded graph would hold one batch's packing, and give wrong numbers for the next."""
    if torch.jit.is_tracing():
        raise InputError(
            "torch.jit.trace would record which tokens of this batch are real, and take the same ones of every other"
            " batch: install transformers, whose own code is then recorded for padded batches, or use torch.compile, or"
            " torch.export of encode_packed"
        )
    # torch 2.11 says of torch.compile, too, that it exports.
    if is_padded and torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        raise InputError(
            "torch.export cannot record how a mask packs a batch: install transformers, whose own code is then recorded"
            " for padded batches, or export encode_packed"
        )


def _check_length(longest: int, limit: int | None) -> None:
    if limit is not None and longest > limit:
        raise InputError(f"a sequence of {longest} tokens is longer than the position table, which has {limit}")


def _first_position(config: EncoderConfig) -> int:
    if config.padding_idx is None:
        raise InputError(f"{config.model_type} counts positions from pad_token_id, which this config does not have")
    return config.padding_idx + 1


def _check_masked(config: EncoderConfig, batch: PackedBatch) -> None:
    """Ids that a mask has left out of `pack_inputs` cannot be counted any more."""
    masked = (batch.bounds or {}).get(MASKED_IDS)
    if masked is not None and masked != (config.padding_idx, config.padding_idx):
        raise InputError(
            f"attention_mask leaves out ids {masked[0]} to {masked[1]} in front of other tokens, and"
            f" {config.model_type} counts positions over all ids but {config.padding_idx}: give position_ids to"
            " fastbert.pack_inputs"
        )


def _positions_from_ids(config, input_ids, grid, batch: PackedBatch) -> torch.Tensor:
    """fairseq's rule: real ids count up from padding_idx + 1, pad ids get padding_idx; taken from ids, not the mask."""
    first = _first_position(config)
    if input_ids is None:
        return (
            batch.local_positions() + first
            if len(grid) == 1
            else (torch.arange(grid[1], device=batch.cu_seqlens.device) + first).expand(grid)
        )
    real = (input_ids != config.padding_idx).long()
    count = real.cumsum(-1)
    if len(grid) == 1:  # packed: counting starts again with each sequence
        before = torch.nn.functional.pad(count, (1, 0))[batch.cu_seqlens.long()]
        sequence, inside = token_sequences(batch.cu_seqlens, grid[0])
        count = torch.where(inside, count - before[sequence], 0)
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
