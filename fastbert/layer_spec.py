"""What a layer computes: the LayerSpec and its parts, plain data without torch; and LayerNumbers, which csrc/ reads.

`python -m fastbert.layer_spec` writes csrc/ops/layer_numbers.h from LayerNumbers: the one place that has their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_type_hints


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
    in each layer.

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


@dataclass(frozen=True)
class NormSpec:
    """kind "rms": RMSNorm (Zhang & Sennrich 2019, eq. 4), which has no bias."""

    kind: Literal["layer", "rms"] = "layer"
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
LINEARS = (*_QKV, "attention_output", "gate", "up", "down", *RELATIVES)


@dataclass(frozen=True)
class LayerNames:
    """Where the leaves of one layer are, below the layer, by role.

    Where one leaf serves several roles (query, key and value; gate and up), these have one path: its rows are theirs,
    in this order; `per_head`: those of the first head's query, key and value, then the second's. `gate`: of gated
    feed-forwards. `relative_key`, `relative_query`: what projects the table of Disentangled, which may be key and query
    themselves; None: there is no such term. `query_bias`, `value_bias`: bare parameters, of a Linear that has no bias.
    `order` is the order in which transformers registers the leaves: an
    optimizer's saved state goes by it.
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
    per_head: bool = False
    order: tuple[str, ...] = (*_QKV, "attention_output", "attention_norm", "up", "down", "feed_forward_norm")

    # What follows from the paths, worked out once: a model looks at them with every call.
    qkv: tuple[str, ...] = field(init=False)  # one path, or three
    ups: tuple[str, ...] = field(init=False)  # up; or gate and up; or the one of both
    linears: tuple[str, ...] = field(init=False)
    relatives: tuple[str, ...] = field(init=False)  # of the table, where they are leaves of their own
    norms: tuple[str, ...] = field(init=False)
    containers: tuple[str, ...] = field(init=False)  # all that stands before a dot, the outer ones first

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("qkv", tuple(dict.fromkeys((self.query, self.key, self.value))))
        put("ups", tuple(dict.fromkeys(path for path in (self.gate, self.up) if path is not None)))
        put("linears", (*self.qkv, self.attention_output, *self.ups, self.down))
        relatives = dict.fromkeys((self.relative_key, self.relative_query))
        put("relatives", tuple(path for path in relatives if path is not None and path not in self.qkv))
        put("norms", (self.attention_norm, self.feed_forward_norm))
        leaves = [path.split(".") for path in (*self.linears, *self.relatives, *self.norms)]
        put("containers", tuple(dict.fromkeys(".".join(n[:i]) for n in leaves for i in range(1, len(n)))))


@dataclass(frozen=True)
class LayerSpec:
    """What the layer at one depth computes, without tensors.

    norm_first: the norms stand before each half (pre-norm) instead of behind it (post-norm). biases: the roles whose
    Linear has one. The dropouts are those of the two halves' results. after: what stands behind the layer.
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
        found = [] if position is None else [position.table]
        if isinstance(position, Disentangled) and position.norm is not None:
            found.append(position.norm)
        found += [] if after is None else [f"{after.path}.conv", f"{after.path}.LayerNorm"]
        return tuple(found)

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
        """All of them: of the attention probabilities, of what goes into the last product, of the halves' results; of
        the table of Disentangled, and of what stands behind the layer, where there are these.
        """
        made = {
            "attention": self.attention.dropout,
            "attention_output": self.attention_output_dropout,
            "inner": self.feed_forward.dropout,
            "feed_forward": self.feed_forward_dropout,
        }
        if isinstance(self.attention.position, Disentangled):
            made["relative"] = self.attention.relative_dropout
        if self.after is not None:
            made["after"] = self.after.dropout
        return made

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


class LayerNumbers(NamedTuple):
    """A layer as the kernels take it: a LayerSpec, and which tensors the tree's leaves have.

    rotary: which of the call's tables turns queries and keys; -1 is none. merged_qkv, merged_gate: one Linear is query,
    key and value, or gate and up, whose rows stand one after the other. rms: the norms are RMSNorm. biases, scales: bit
    i, the layer's Linear i has a bias, or a weight_scale (int8). norms: a bit each for weight and bias of the
    attention's norm and of the feed-forward's. relative: bit 0 for a relative key, bit 1 for a relative query, bit 2
    for a bias by distance. The dropouts are 0 where the layer does not train.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window_left: int
    window_right: int
    rotary: int
    norm_first: bool
    merged_qkv: bool
    gated: bool
    merged_gate: bool
    rms: bool
    biases: int
    scales: int
    norms: int
    relative: int
    softmax_scale: float
    attention_norm_eps: float
    feed_forward_norm_eps: float
    attention_dropout: float
    attention_output_dropout: float
    inner_dropout: float
    feed_forward_dropout: float

    @classmethod
    def of(
        cls, spec: LayerSpec, rotary: int, bits: tuple[int, int, int], eps: Sequence[float], trains: bool
    ) -> LayerNumbers:
        """bits: biases, scales and norms. eps: of the attention's norm and of the feed-forward's."""
        attention, dropouts = spec.attention, spec.dropouts
        scale = 1.0 / math.sqrt(attention.head_dim) if attention.softmax_scale is None else attention.softmax_scale
        return cls(
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            *attention.window_size,
            rotary,
            spec.norm_first,
            spec.merges_qkv,
            spec.feed_forward.gated,
            spec.merges_gate,
            spec.norm.kind == "rms",
            *bits,
            spec.relative_bits,
            scale,
            eps[0],
            eps[1],
            *([*dropouts.values()][:4] if trains else (0.0,) * 4),
        )

    @classmethod
    def read(cls, ints: Sequence[int], floats: Sequence[float]) -> list[LayerNumbers]:
        """Those of several layers, as `ints` and `floats` wrote them one behind the other."""
        return [
            cls(*ints[i * NUM_INTS : (i + 1) * NUM_INTS], *floats[i * NUM_FLOATS : (i + 1) * NUM_FLOATS])  # type: ignore[arg-type]
            for i in range(len(ints) // NUM_INTS)
        ]

    @property
    def ints(self) -> list[int]:
        return [int(n) for n in self[:NUM_INTS]]

    @property
    def floats(self) -> list[float]:
        return [*self[NUM_INTS:]]

    @property
    def dropouts(self) -> tuple[float, float, float, float]:
        """By the order of LayerSpec.dropouts."""
        return (self.attention_dropout, self.attention_output_dropout, self.inner_dropout, self.feed_forward_dropout)

    @property
    def num_linears(self) -> int:
        return (1 if self.merged_qkv else 3) + 1 + (2 if self.gated and not self.merged_gate else 1) + 1


_TYPES = get_type_hints(LayerNumbers)
NUM_INTS = sum(kind is not float for kind in _TYPES.values())  # how many of each a layer has; the floats come last
NUM_FLOATS = len(_TYPES) - NUM_INTS
HEADER = Path(__file__).parents[1] / "csrc" / "ops" / "layer_numbers.h"


def header() -> str:
    """The C++ struct with the same fields, and what reads it from the lists."""
    in_cpp = {int: "int64_t", bool: "bool", float: "double"}
    fields, reads = [], []
    for i, (name, kind) in enumerate(_TYPES.items()):
        value = f"floats[{i - NUM_INTS}]" if kind is float else f"ints[{i}]" + " != 0" * (kind is bool)
        fields.append(f"  {in_cpp[kind]} {name};\n")
        reads.append(f"    made.{name} = {value};\n")
    return f"""// Written by `python -m fastbert.layer_spec`, whose LayerNumbers says what these are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastbert {{

struct LayerNumbers {{
  static constexpr size_t kInts = {NUM_INTS}, kFloats = {NUM_FLOATS};

{"".join(fields)}
  static LayerNumbers read(const int64_t* ints, const double* floats) {{
    LayerNumbers made;
{"".join(reads)}    return made;
  }}
}};

}}  // namespace fastbert
"""


if __name__ == "__main__":
    HEADER.write_text(header(), encoding="utf-8")
