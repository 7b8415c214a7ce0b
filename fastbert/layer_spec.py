"""What a layer computes: the LayerSpec and its parts, plain data without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple


class Invalid(ValueError):
    """A field of a config has a value that the family's data does not allow; `allowed` says in words what is."""

    def __init__(self, name: str, value: Any, allowed: str):
        super().__init__(f"{name} is {value!r}; it must be {allowed}")
        self.name, self.value, self.allowed = name, value, allowed


class RotarySpec(NamedTuple):
    """Rotary position embedding (Su et al. 2021, section 3.4.2) of queries and keys.

    dim: how many dimensions of a head are rotated, its first ones (all, or a part as in GPT-NeoX). interleaved:
    dimension 2i is paired with 2i + 1 instead of i with dim / 2 + i. rotates_values: of values, too. scaling:
    (rope_type, its parameters as pairs); () is the plain table of theta. table: the path of a leaf that holds the
    table's sines and then cosines, which is saved.
    frequencies: the path of a buffer that holds the inverse frequencies, which is saved. hf_frequencies: where
    transformers' tree has them, where they are not saved.
    """

    theta: float
    dim: int
    interleaved: bool = False
    rotates_values: bool = False
    scaling: tuple[Any, ...] = ()
    table: str | None = None
    frequencies: str | None = None
    hf_frequencies: str | None = None


class RelativeBias(NamedTuple):
    """A number for each head and kind of distance, added to the scores (Raffel et al. 2020, section 2.1).

    table: the path of an Embedding (num_rows, num_heads), below the base model; all layers share it. Half of
    `num_buckets` are for keys before the query and half for those behind it; from `max_distance` on there is one.
    """

    table: str
    num_rows: int
    num_buckets: int = 32
    max_distance: int = 128


class Disentangled(NamedTuple):
    """Disentangled attention: scores have terms of a token and a distance (He et al. 2021, "DeBERTa", section 3.1).

    table: the path of an Embedding (2 * span, hidden_size), below the base model; norm: of a norm of its rows. Layers
    project it: `LayerNames.relative_key` for the content-to-position term, `relative_query` for position-to-content.
    A distance is clamped to the span; where there are `buckets`, half of them are for one distance each, and the others
    grow up to `max_distance`.
    """

    table: str
    span: int
    norm: str | None = None
    buckets: int = 0
    max_distance: int = 0


Position = RotarySpec | RelativeBias | Disentangled


@dataclass(frozen=True)
class AttentionSpec:
    """window_size: (left, right), how far before and behind itself a query sees keys; -1 is unlimited. position: what
    the scores have of the distance of two tokens; None: nothing. relative_dropout: of the table of Disentangled, drawn
    in each layer. norm: of each head of queries and of keys, before they are rotated (Henry et al. 2020, "Query-Key
    Normalization", section 3, with a learned norm in the place of the unit one); None: there is none.

    Raises Invalid: `position` takes dimensions that a head does not have, or not in pairs.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float | None = None  # None: 1 / sqrt(head_dim)
    dropout: float = 0.0
    window_size: tuple[int, int] = (-1, -1)
    position: Position | None = None
    relative_dropout: float = 0.0
    norm: NormSpec | None = None

    @property
    def rotary(self) -> RotarySpec | None:
        return self.position if isinstance(self.position, RotarySpec) else None

    @property
    def relative(self) -> RelativeBias | Disentangled | None:
        return None if isinstance(self.position, RotarySpec) else self.position

    def __post_init__(self) -> None:
        if not isinstance(self.position, RotarySpec):
            return
        if (dim := self.position.dim) % 2:
            name = "head_dim" if dim == self.head_dim else "the width that rotary embedding turns"
            raise Invalid(name, dim, "even: rotary embedding takes the dimensions of a head in pairs")
        if not 0 < dim <= self.head_dim:
            raise Invalid("the width that rotary embedding turns", dim, f"from 2 to head_dim, {self.head_dim}")


@dataclass(frozen=True)
class FeedForwardSpec:
    """gated: activation(gate) * up (Shazeer 2020, section 2). dropout: of what goes into the last product."""

    intermediate_size: int
    activation: str
    gated: bool = False
    dropout: float = 0.0


NormType = Literal["layer", "rms", "zero_centered_rms"]


@dataclass(frozen=True)
class NormSpec:
    """type "rms": RMSNorm (Zhang & Sennrich 2019, eq. 4), which has no bias. "zero_centered_rms": the same, by 1 +
    weight, as in the code of Gemma (Gemma Team 2024).
    """

    type: NormType = "layer"
    eps: float = 1e-12
    bias: bool = True


class ConvSpec(NamedTuple):
    """A convolution over a sequence's columns, behind a layer: norm(out + activation(dropout(conv(x)))), where x went
    into the first layer and `out` came out of this one (He et al. 2021, "DeBERTa", version 2).

    path: of the container of its leaves, `conv` and `LayerNorm`, below the base model. A hole in a mask is a column of
    zeros.
    """

    path: str
    kernel_size: int
    groups: int
    activation: str
    dropout: float


class Distances(NamedTuple):
    """What in a stack of layers goes by the distance of two tokens."""

    rotaries: tuple[RotarySpec, ...] = ()
    has_windows: bool = False
    relatives: tuple[RelativeBias | Disentangled, ...] = ()

    @property
    def are_absolute(self) -> bool:
        """Whether it counts where a sequence begins, too: values that are rotated, and tables that are not known to be
        rotations, of which only the difference of two positions would remain.
        """
        return any(rotary.rotates_values or rotary.table is not None for rotary in self.rotaries)


_QKV = ("query", "key", "value")
RELATIVES = ("relative_key", "relative_query")
NORMS = (
    *("attention_norm", "feed_forward_norm", "query_norm", "key_norm"),
    *("attention_output_norm", "feed_forward_output_norm"),
)
LINEARS = (*_QKV, "attention_output", "gate", "up", "down", *RELATIVES)


@dataclass(frozen=True)
class LayerNames:
    """Where the leaves of one layer are, below the layer, by role.

    Where one leaf serves several roles (query, key and value; gate and up), these have one path: its rows are theirs,
    in this order; `per_head`: those of the first head's query, key and value, then the second's. `gate`: of gated
    feed-forwards. `relative_key`, `relative_query`: what projects the table of Disentangled, which may be key and query
    themselves; None: there is no such term. `query_bias`, `value_bias`: bare parameters, of a Linear that has no bias.
    `query_norm`, `key_norm`: of AttentionSpec.norm. `attention_output_norm`, `feed_forward_output_norm`: of what a
    sublayer gives, before the residual is added (Gemma Team 2024, "Gemma 2", section 2); None: there is none. `order`
    is the order in which transformers registers the leaves: an optimizer's saved state goes by it.
    """

    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    attention_output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    feed_forward_norm: str = "output.LayerNorm"
    gate: str | None = None
    relative_key: str | None = None
    relative_query: str | None = None
    query_bias: str | None = None
    value_bias: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None
    attention_output_norm: str | None = None
    feed_forward_output_norm: str | None = None
    per_head: bool = False
    order: tuple[str, ...] = (*_QKV, "attention_output", "attention_norm", "up", "down", "feed_forward_norm")

    # What follows from the paths, worked out once: a model looks at them with every call.
    qkv: tuple[str, ...] = field(init=False)  # one path, or three
    ups: tuple[str, ...] = field(init=False)  # up; or gate and up; or the one of both
    linears: tuple[str, ...] = field(init=False)
    relatives: tuple[str, ...] = field(init=False)  # of the table, where they are leaves of their own
    norms: tuple[str | None, ...] = field(init=False)  # by the order of NORMS, up to the last that there is
    containers: tuple[str, ...] = field(init=False)  # all that stands before a dot, the outer ones first

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("qkv", tuple(dict.fromkeys((self.query, self.key, self.value))))
        put("ups", tuple(dict.fromkeys(path for path in (self.gate, self.up) if path is not None)))
        put("linears", (*self.qkv, self.attention_output, *self.ups, self.down))
        relatives = dict.fromkeys((self.relative_key, self.relative_query))
        put("relatives", tuple(path for path in relatives if path is not None and path not in self.qkv))
        norms = [getattr(self, role) for role in NORMS]
        put("norms", tuple(norms[: 1 + max(i for i, path in enumerate(norms) if path is not None)]))
        leaves = [path.split(".") for path in (*self.linears, *self.relatives, *self.norms) if path is not None]
        put("containers", tuple(dict.fromkeys(".".join(n[:i]) for n in leaves for i in range(1, len(n)))))


@dataclass(frozen=True)
class LayerSpec:
    """What the layer at one depth computes, without tensors.

    norm: of all norms but those of heads. norm_first: the norms stand before each sublayer (pre-norm) instead of behind
    it (post-norm). biases: the roles whose Linear has one. The dropouts are those of the two sublayers' results. after:
    what stands behind the layer.
    """

    names: LayerNames
    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec
    norm_first: bool = False
    has_attention_norm: bool = True
    attention_output_dropout: float = 0.0
    feed_forward_dropout: float = 0.0
    biases: tuple[str, ...] = LINEARS
    after: ConvSpec | None = None

    @property
    def shared_leaves(self) -> tuple[str, ...]:
        """The paths, below the base model, of leaves that stand beside the layer and that it takes part in: the table
        of distances and its norm, the convolution and its norm.
        """
        position, after = self.attention.relative, self.after
        paths = [] if position is None else [position.table]
        if isinstance(position, Disentangled) and position.norm is not None:
            paths.append(position.norm)
        paths += [] if after is None else [f"{after.path}.conv", f"{after.path}.LayerNorm"]
        return tuple(paths)

    @property
    def norm_paths(self) -> tuple[str | None, ...]:
        """Of the norms, below the layer, by the order of NORMS, up to the last that there is; None: there is none."""
        return self.names.norms if self.has_attention_norm else (None, *self.names.norms[1:])

    def norm_of(self, i: int) -> NormSpec:
        """What the i-th of NORMS is."""
        of_heads = self.attention.norm if NORMS[i] in ("query_norm", "key_norm") else None
        return self.norm if of_heads is None else of_heads

    @property
    def relative_bits(self) -> int:
        """As LayerNumbers.relative; 0: the scores have no such terms."""
        if self.attention.relative is None:
            return 0
        if isinstance(self.attention.relative, RelativeBias):
            return 4
        return (self.names.relative_key is not None) | (self.names.relative_query is not None) << 1

    @property
    def merges_qkv(self) -> bool:
        """One Linear is query, key and value."""
        return len(self.names.qkv) == 1

    @property
    def merges_gate(self) -> bool:
        """One Linear is gate and up."""
        return self.feed_forward.gated and len(self.names.ups) == 1

    @property
    def dropouts(self) -> dict[str, float]:
        """All of them: of the attention probabilities, of what goes into the last product, of the sublayers' results;
        of the table of Disentangled, and of what stands behind the layer, where there are these.
        """
        rates = {
            "attention": self.attention.dropout,
            "attention_output": self.attention_output_dropout,
            "inner": self.feed_forward.dropout,
            "feed_forward": self.feed_forward_dropout,
        }
        if isinstance(self.attention.position, Disentangled):
            rates["relative"] = self.attention.relative_dropout
        if self.after is not None:
            rates["after"] = self.after.dropout
        return rates

    def causal(self) -> LayerSpec:
        """The same, but that attention sees no token behind its own."""
        left, _ = self.attention.window_size
        return replace(self, attention=replace(self.attention, window_size=(left, 0)))

    def with_dropouts(self, dropouts: Mapping[str, float]) -> LayerSpec:
        """The same with these, all of them, by the names of `dropouts`."""
        attention = replace(
            self.attention, dropout=dropouts["attention"], relative_dropout=dropouts.get("relative", 0.0)
        )
        return replace(
            self,
            attention=attention,
            after=None if self.after is None else self.after._replace(dropout=dropouts["after"]),
            attention_output_dropout=dropouts["attention_output"],
            feed_forward=replace(self.feed_forward, dropout=dropouts["inner"]),
            feed_forward_dropout=dropouts["feed_forward"],
        )
