"""What families with Llama's layers share (Touvron et al. 2023, section 2.2): the names, and how a spec follows from a
config.
"""

from __future__ import annotations

from typing import Any

from fastbert.families.schema import ClassifierHead
from fastbert.layer_spec import AttentionSpec, FeedForwardSpec, Invalid, LayerNames, LayerSpec, NormSpec, Position

LAYER = LayerNames(
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    feed_forward_norm="post_attention_layernorm",
    order=("query", "key", "value", "attention_output", "gate", "up", "down", "attention_norm", "feed_forward_norm"),
)

# A decoder's head over a sequence: a Linear over its last token.
LAYER_ARGUMENTS = ("attention_mask", "position_ids", "cache", "use_cache", "position_embeddings")
LAST_TOKEN = ClassifierHead(out="score", pooling="last", last_by_id=True, out_bias=False, dropout=0.0)


def rms_norm(config: Any) -> NormSpec:
    return NormSpec("rms", config.layer_norm_eps, bias=False)


def llama_spec(
    config: Any,
    position: Position | None,
    names: LayerNames = LAYER,
    norm: NormSpec | None = None,
    window_size: tuple[int, int] = (-1, -1),
    has_mlp_bias: bool = False,
    **attention: Any,
) -> LayerSpec:
    """A pre-norm layer with grouped queries and a gated feed-forward. norm: of all norms, also of heads', where
    `names` has them. attention: more fields of its AttentionSpec.

    Raises Invalid: the key heads do not divide the query heads.
    """
    count, groups = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    if count % groups:
        raise Invalid("num_key_value_heads", groups, f"a divisor of num_attention_heads, {count}")
    norm = rms_norm(config) if norm is None else norm
    return LayerSpec(
        names,
        AttentionSpec(
            count,
            groups,
            config.head_dim,
            dropout=config.attention_probs_dropout_prob,
            window_size=window_size,
            position=position,
            norm=None if names.query_norm is None else norm,
            **attention,
        ),
        FeedForwardSpec(config.intermediate_size, config.activation, gated=True),
        norm,
        norm_first=True,
        biases=(
            *(("query", "key", "value", "attention_output") if config.attention_bias else ()),
            *(("gate", "up", "down") if has_mlp_bias else ()),
        ),
    )


def layer_types(config: Any, default: list[str]) -> list[str]:
    """One of "full_attention" and "sliding_attention" a layer; `default`: where the config has none. Raises Invalid."""
    types, count = config.layer_types, config.num_hidden_layers
    if types is None:
        return default
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, (list, tuple)) or len(types) < count or not all(name in known for name in types):
        raise Invalid("layer_types", types, f"a list of {count} or more of {', '.join(known)}")
    return list(types)
