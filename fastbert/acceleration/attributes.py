"""What transformers' modules compute by, beside their tensors and the modules below them, and what packed execution
takes it to be: one table, by which the first look at a model and all later ones go.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastbert.config import EncoderConfig
from fastbert.families import disentangled
from fastbert.layer_spec import AttentionSpec, Disentangled
from fastbert.layers.leaves import get_leaf, in_use

_ANYTHING = object()  # what no forward reads in this family


def _window(attention: AttentionSpec) -> int | None:
    left, _ = attention.window_size
    return None if left < 0 else left + 1  # counted with the query's own token


def _is_freed(config: EncoderConfig) -> bool:
    """Whether its config lets tokens of a decoder see those behind them, of which its modules know nothing."""
    return config.own.get("is_causal") is False


def _mask_token(config: EncoderConfig) -> Any:
    dropout = config.embeddings.token_dropout
    return _ANYTHING if dropout is None else dropout.mask_token_id


def _of_field(name: str) -> Callable[[EncoderConfig, AttentionSpec], Any]:
    return lambda config, attention: getattr(config, name)


def _rows(attention: AttentionSpec) -> int:
    return 2 * attention.position.span if isinstance(attention.position, Disentangled) else 0


def _of_activation(name: str) -> Callable[[EncoderConfig, AttentionSpec], Any]:
    def value(config: EncoderConfig, attention: AttentionSpec) -> Any:
        from transformers.activations import ACT2FN

        return vars(ACT2FN[config.hidden_act]).get(name, _ANYTHING)

    return value


# Attributes under all names that the families have for them -> the value, by the config and the attention of the layer
# that the module is in. Those of dropouts are a family's data (HfClass). What is not here is no forward's business:
# tests/acceleration/test_attributes.py changes every attribute of every module and looks at the outputs.
_TABLE: dict[str, Callable[[EncoderConfig, AttentionSpec], Any]] = {
    **dict.fromkeys(("num_attention_heads", "n_heads"), lambda config, attention: attention.num_heads),
    **dict.fromkeys(("attention_head_size", "head_dim"), lambda config, attention: attention.head_dim),
    "num_key_value_groups": lambda config, attention: attention.num_heads // attention.num_kv_heads,
    "scaling": lambda config, attention: (
        config.family.hf_class.scaling or attention.softmax_scale or attention.head_dim**-0.5
    ),
    "sliding_window": lambda config, attention: _ANYTHING if _is_freed(config) else _window(attention),
    "is_causal": lambda config, attention: _ANYTHING if _is_freed(config) else attention.window_size[1] == 0,
    "attention_type": lambda config, attention: "full_attention" if _window(attention) is None else "sliding_attention",
    **dict.fromkeys(("is_decoder", "is_cross_attention", "add_cross_attention"), lambda config, attention: False),
    "rotary_value": lambda config, attention: attention.rotary is not None and attention.rotary.rotates_values,
    "position_embedding_type": lambda config, attention: "rotary" if config.embeddings.position is None else "absolute",
    "padding_idx": lambda config, attention: config.padding_idx if config.family.positions_from_ids else _ANYTHING,
    "token_dropout": lambda config, attention: config.embeddings.token_dropout is not None,
    "mask_token_id": lambda config, attention: _mask_token(config),
    "use_task_id": lambda config, attention: config.embeddings.task_type is not None,
    "max_norm": lambda config, attention: None,  # of a table that is read, and not called
    # Of DeBERTa's modules
    "relative_attention": lambda config, attention: config.relative_attention,
    "pos_att_type": lambda config, attention: disentangled.terms(config),
    "max_relative_positions": lambda config, attention: disentangled.span_of(config),
    "pos_ebd_size": lambda config, attention: _rows(attention) // 2,
    "norm_rel_ebd": lambda config, attention: [part.strip() for part in config.norm_rel_ebd.lower().split("|")],
    "z_steps": lambda config, attention: 0,
    **{name: _of_field(name) for name in ("position_buckets", "share_att_key", "conv_act", "position_biased_input")},
    "act": _of_activation("act"),
    "approximate": _of_activation("approximate"),
}


def expected_of(module: nn.Module, config: EncoderConfig, attention: AttentionSpec | None) -> dict[str, Any]:
    """What the attributes of a module must be. `attention`: of the layer that it is in; None: it is in none."""
    if attention is None:
        attention = next((spec.attention for spec in config.layer_specs), None)
    if attention is None:  # a model without layers
        return {}
    values = {name: value(config, attention) for name, value in _TABLE.items() if name in module.__dict__}
    return {name: value for name, value in values.items() if value is not _ANYTHING}


def attribute_unsupported(module: nn.Module, path: str, expected: dict[str, Any]) -> str | None:
    for name, value in expected.items():
        actual = module.__dict__.get(name)
        if not _is_same(actual, value):
            return f"{f'{path}.' if path else ''}{name} is {actual}; by its config it must be {value}"
    return None


def _is_same(actual: Any, value: Any) -> bool:
    if isinstance(actual, float) and isinstance(value, float):
        return math.isclose(actual, value)  # transformers may have another order of the same operations
    return bool(_plain(actual) == _plain(value))


def _plain(value: Any) -> Any:
    """Functions are made anew with each module."""
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    return getattr(value, "__func__", value)


# ----------------------------------------------------------------------------------------------------------------------
# Buffers that transformers reads where a call gives no such ids

_COUNTED = ("position_ids", "token_type_ids")
SeenBuffers = dict[str, tuple[torch.Tensor, int]]  # by name: what was found right, and its version then


def buffer_unsupported(root: nn.Module, config: EncoderConfig, call_args: dict, seen: SeenBuffers) -> str | None:
    """Why what the embeddings hold in the place of ids that are not among `call_args` is not what a token's place
    says.
    """
    scope = config.scopes.embeddings
    buffers = {} if scope is None else in_use(get_leaf(root, scope))._buffers
    for name in _COUNTED[1:] if config.family.positions_from_ids else _COUNTED:
        buffer = buffers.get(name)
        if buffer is None or call_args.get(name) is not None or buffer.is_meta:
            continue
        version = -1 if buffer.is_inference() else buffer._version  # an inference tensor counts none
        known, when = seen.get(name, (None, -1))
        if known is buffer and version == when != -1:
            continue
        row = torch.arange(buffer.shape[-1], device=buffer.device)
        if not bool((buffer == (row if name == _COUNTED[0] else 0)).all()):
            must = "count from 0" if name == _COUNTED[0] else "be zeros"
            return f"the buffer {name} of its embeddings does not {must}"
        seen[name] = buffer, version
    return None
