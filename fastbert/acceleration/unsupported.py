"""What packed execution would not honour of a call's arguments; and how a call says that it is packed already."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from fastbert.acceleration.plan import PackedPlan, asked_of
from fastbert.errors import InputError
from fastbert.models.inputs import IGNORED, TableSizes

TENSORS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "task_type_ids")
OPTIONS = ("output_attentions", "output_hidden_states", "return_dict")
# What transformers' collator for flattened batches adds, and its attention takes (FlashAttentionKwargs).
FLATTENED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_ARGUMENTS = {*TENSORS, *OPTIONS, *IGNORED}

# Those that compute softmax(q k^T / sqrt(d)) v and nothing else: which of them is asked for makes no difference.
_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


class Flattened(NamedTuple):
    """Where the sequences are in a row that holds all of a batch: those of FlashAttentionKwargs."""

    cu_seqlens: torch.Tensor
    max_seqlen: int | None


def call_unsupported(module: Any, plan: PackedPlan, tables: TableSizes, call_args: dict, options: dict) -> str | None:
    """Why this call must be transformers' own; what is wrong with an input is left to prepare_inputs to say."""
    arguments = _ARGUMENTS if call_args.get("cu_seq_lens_q") is None else _ARGUMENTS.union(FLATTENED)
    for name, value in call_args.items():
        if name not in arguments and value is not None and value is not False:
            return f"the argument {name} is not one that fastbert reads"
    if plan.family.hf_class.caches and call_args.get("use_cache"):
        return "use_cache=True asks for the keys and values of its tokens"
    if (causal := call_args.get("is_causal")) is not None and bool(causal) != _is_causal(plan):
        return f"is_causal is {causal}; when the model was accelerated it was {not causal}"
    if (unsupported := _config_unsupported(module.config, plan, options)) is not None:
        return unsupported
    tensors = {name: call_args[name] for name in TENSORS if call_args.get(name) is not None}
    for name, t in tensors.items():
        if type(t) not in (torch.Tensor, nn.Parameter) or t.device.type == "meta":
            return f"{name} is a {type(t).__name__} on {t.device}; fastbert packs plain tensors that hold values"
    grid: tuple[int, ...] = next((tensors[n].shape[:2] for n in ("input_ids", "inputs_embeds") if n in tensors), ())
    if len(grid) != 2 or 0 in grid:
        return "the batch is empty" if 0 in grid else None
    for name in ("attention_mask", "token_type_ids", "position_ids", "task_type_ids"):
        shape = tensors[name].shape if name in tensors else grid
        if shape != grid and (name != "position_ids" or shape != (1, *grid[1:])):
            return f"{name} is not of shape (batch, seqlen)"
    counted = plan.family.positions_from_ids and "position_ids" not in tensors
    limit = tables.longest(plan.config)
    if counted and limit is not None and grid[-1] > limit:
        return (
            f"the batch has {grid[-1]} columns, and the position table places for {limit} tokens: transformers allows"
            " padding beyond them"
        )
    mask = tensors.get("attention_mask")
    if mask is None or plan.reads == "tokens":
        return None
    if plan.reads == "padding" and not mask.all():
        return (
            "its head's softmax runs over the padding; accelerate(model, spans_over_real_tokens=True) leaves that out,"
            " as fastbert's own head does"
        )
    if plan.reads == "last id" and not _last_is_real(module.config.pad_token_id, tensors.get("input_ids"), mask):
        return "the last token by its id, which its head reads, is one that the mask leaves out"
    if plan.reads == "last id":
        return None
    if plan.reads == "last" and not mask[:, -1].all():
        return "padding on the right: the last column, which its head reads, holds no token"
    if (late := mask[:, 0] == 0).any() and mask[late].any():
        return "padding on the left: column 0, which poolers and heads read, holds no token; pad on the right"
    return None


def _last_is_real(pad: int | None, ids: torch.Tensor | None, mask: torch.Tensor) -> bool:
    """Whether the mask has the last token of each row whose id is not `pad`, or without ids the last column."""
    if pad is None or ids is None:
        return bool(mask[:, -1].all())
    columns = torch.arange(ids.shape[1], device=ids.device)
    last = (columns * (ids != pad)).argmax(-1, keepdim=True)
    return bool(mask.gather(1, last).all())


def _config_unsupported(config: Any, plan: PackedPlan, options: dict) -> str | None:
    """Of what transformers' forward reads in its config with each call."""
    live = vars(config)  # not every family's config has these
    causal, attention = live.get("is_decoder"), live.get("_attn_implementation_internal")
    if causal or _wants_causal(plan, live.get("is_causal")) or attention not in _ATTENTION:
        return "its config asks for causal attention, or for an implementation that fastbert does not know"
    if not isinstance(options["output_hidden_states"], bool | None):
        return "output_hidden_states selects some layers; fastbert gives those of all layers, or none"
    if options["output_hidden_states"] and live.get("tie_last_hidden_states") is False:
        return "its config asks for the last hidden state as it is before the final norm"
    if (asked := asked_of(config)) != plan.asked:
        name = next(name for name in (*asked, *plan.asked) if asked.get(name) != plan.asked.get(name))
        return f"its config's {name} is {asked.get(name)}; when the model was accelerated it was {plan.asked.get(name)}"
    return None


def _is_causal(plan: PackedPlan) -> bool:
    return any(spec.attention.window_size[1] == 0 for spec in plan.config.layer_specs)


def _wants_causal(plan: PackedPlan, asked: Any) -> bool:
    """Whether attention is to be causal, and the model's is not."""
    return bool(asked) and not _is_causal(plan)


def flattened_unsupported(plan: PackedPlan, call_args: dict) -> str | None:
    """Why a call with `cu_seq_lens_q` must be transformers' own."""
    rows = next((call_args[n].shape[0] for n in ("input_ids", "inputs_embeds") if call_args.get(n) is not None), 1)
    mask, keys = call_args.get("attention_mask"), call_args.get("cu_seq_lens_k")
    if rows != 1:
        return f"cu_seq_lens_q stands for one row that holds all sequences; there are {rows} rows"
    if mask is not None and not mask.all():
        return "with an attention_mask that has padding, transformers does not read cu_seq_lens_q"
    if (
        keys is not None
        and keys is not call_args["cu_seq_lens_q"]
        and not torch.equal(keys, call_args["cu_seq_lens_q"])
    ):
        return "cu_seq_lens_k is not cu_seq_lens_q"
    if call_args.get("position_ids") is None and plan.config.embeddings.position is not None:
        return "cu_seq_lens_q without position_ids: transformers counts positions through all sequences"
    return None


def flattened(
    config: Any, call_args: dict, options: dict, documents: torch.Tensor | str | None = None
) -> Flattened | None:
    """How a call says that its row holds several sequences, none of which sees another; None where it does not.

    By cu_seq_lens_q, or by `documents_of`. By position_ids that start again only where transformers goes by them: its
    flash attention does, the others let all tokens of a row see each other.
    """
    cu_seqlens, positions = call_args.get("cu_seq_lens_q"), call_args.get("position_ids")
    if cu_seqlens is None and positions is not None:
        attention = vars(config).get("_attn_implementation_internal")
        cu_seqlens = _restarts(positions, call_args) if str(attention).startswith("flash") else None
    if cu_seqlens is None and isinstance(documents, torch.Tensor):
        cu_seqlens = documents
    if cu_seqlens is None:
        return None
    longest = call_args.get("max_length_q")
    if options["output_attentions"]:
        raise InputError("output_attentions is not for a row of several sequences (cu_seq_lens_q)")
    return Flattened(cu_seqlens, None if longest is None else int(longest))


def query_only_unsupported(plan: PackedPlan, call_args: dict, query_only: torch.Tensor | None) -> str | None:
    """Why tokens that attend while the mask leaves them out must be transformers' own: query_only, (batch, seqlen)."""
    if query_only is None:
        return None
    mask = call_args.get("attention_mask")
    if not plan.family.masked_tokens_attend:
        return "query_expansion with attend=False: transformers clears what this model has of masked tokens"
    if type(mask) is not torch.Tensor or mask.shape != query_only.shape:
        return "query_expansion with attend=False, and a mask of another shape"
    if bool(((mask != 0) & (query_only.to(mask.device).cumsum(1) > 0)).any()):
        return "query_expansion with attend=False, and padding on the left"
    return None


def documents_of(plan: PackedPlan, config: Any, call_args: dict) -> torch.Tensor | str | None:
    """Offsets of the sequences in a row of a decoder's, where a call has no mask and no cache: its causal mask takes
    tokens whose positions do not count up by one for the ends of sequences. Or why such a call must be transformers'
    own; None: there are none.
    """
    positions, cached = call_args.get("position_ids"), call_args.get("use_cache")
    cached = vars(config).get("use_cache") if cached is None else cached
    is_freed = plan.config.own.get("is_causal") is False
    if not plan.family.hf_class.caches or is_freed or cached or call_args.get("attention_mask") is not None:
        return None
    if type(positions) is not torch.Tensor or positions.dim() != 2 or bool((positions.diff(dim=1) == 1).all()):
        return None
    words = call_args.get("input_ids") if call_args.get("inputs_embeds") is None else call_args["inputs_embeds"]
    shows_probs = call_args.get("output_attentions") or vars(config).get("output_attentions")
    if shows_probs or words is None or words.shape[0] != 1 or positions.shape != words.shape[:2]:
        return "position_ids that do not count up by one: transformers' mask takes them for several sequences"
    ends = (positions[0].diff() != 1).nonzero().flatten() + 1
    return torch.nn.functional.pad(torch.nn.functional.pad(ends, (1, 0)), (0, 1), value=words.shape[1]).int()


def _restarts(positions: torch.Tensor, call_args: dict) -> torch.Tensor | None:
    """Offsets of the sequences in one row by its positions, as transformers finds them; None where it holds one."""
    mask, row = call_args.get("attention_mask"), positions.reshape(-1)
    words = call_args.get("input_ids") if call_args.get("inputs_embeds") is None else call_args["inputs_embeds"]
    if words is None or words.shape[0] != 1 or len(row) != words.shape[1] or (mask is not None and not mask.all()):
        return None
    first = row.min()
    if not len(row) or bool((row - first == torch.arange(len(row), device=row.device)).all()):
        return None
    starts = (row == first).nonzero().flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=len(row)).int()
