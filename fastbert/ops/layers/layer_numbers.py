"""LayerNumbers: a LayerSpec as csrc/ reads it.

`write` writes csrc/ops/layer_numbers.h: the one place that has their order is here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

from fastbert.layer_spec import LayerSpec, NormSpec, NormType

_NORM_TYPES = get_args(NormType)


def _number_of(norm: NormSpec) -> int:
    """-1: the kernels have no such norm."""
    return _NORM_TYPES.index(norm.type) if norm.type in _NORM_TYPES else -1


class LayerNumbers(NamedTuple):
    """A layer as the kernels take it: a LayerSpec, and which tensors the tree's leaves have.

    rotary: which of the call's tables turns queries and keys; -1 is none. merged_qkv, merged_gate: one Linear is
    query, key and value, or gate and up, whose rows stand one after the other. norm, head_norm: what the norms are,
    and those of queries' and keys' heads, by the order of NormType. biases, scales: bit i, the layer's Linear i has
    a bias, or a weight_scale (int8). norms: a bit each for weight and bias of the norms, by the order of NORMS.
    relative: bit 0 for a relative key, bit 1 for a relative query, bit 2 for a bias by distance. The dropouts are 0
    where the layer does not train.
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
    norm: int
    head_norm: int
    biases: int
    scales: int
    norms: int
    relative: int
    softmax_scale: float
    attention_norm_eps: float
    feed_forward_norm_eps: float
    query_norm_eps: float
    key_norm_eps: float
    attention_output_norm_eps: float
    feed_forward_output_norm_eps: float
    attention_dropout: float
    attention_output_dropout: float
    inner_dropout: float
    feed_forward_dropout: float

    @classmethod
    def of(
        cls, spec: LayerSpec, rotary: int, bits: tuple[int, int, int], eps: Sequence[float], trains: bool
    ) -> LayerNumbers:
        """bits: biases, scales and norms. eps: of the norms, by the order of NORMS."""
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
            _number_of(spec.norm),
            _number_of(attention.norm or spec.norm),
            *bits,
            spec.relative_bits,
            scale,
            *eps,
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
    def rms(self) -> bool:
        """The norms have no mean."""
        return self.norm != 0

    @property
    def dropouts(self) -> tuple[float, float, float, float]:
        """By the order of LayerSpec.dropouts."""
        return (self.attention_dropout, self.attention_output_dropout, self.inner_dropout, self.feed_forward_dropout)

    @property
    def num_linears(self) -> int:
        return (1 if self.merged_qkv else 3) + 1 + (2 if self.gated and not self.merged_gate else 1) + 1


_TYPES = get_type_hints(LayerNumbers)
NUM_INTS = sum(each is not float for each in _TYPES.values())  # how many of each a layer has; the floats come last
NUM_FLOATS = len(_TYPES) - NUM_INTS
HEADER = Path(__file__).parents[3] / "csrc" / "ops" / "layer_numbers.h"


def header() -> str:
    """The C++ struct with the same fields, and what reads it from the lists."""
    in_cpp = {int: "int64_t", bool: "bool", float: "double"}
    fields, reads = [], []
    for i, (name, field_type) in enumerate(_TYPES.items()):
        value = f"floats[{i - NUM_INTS}]" if field_type is float else f"ints[{i}]" + " != 0" * (field_type is bool)
        fields.append(f"  {in_cpp[field_type]} {name};\n")
        reads.append(f"    numbers.{name} = {value};\n")
    return f"""// Written by fastbert.ops.layers.layer_numbers.write, whose LayerNumbers says what these are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastbert {{

struct LayerNumbers {{
  static constexpr size_t kInts = {NUM_INTS}, kFloats = {NUM_FLOATS};

{"".join(fields)}
  static LayerNumbers read(const int64_t* ints, const double* floats) {{
    LayerNumbers numbers;
{"".join(reads)}    return numbers;
  }}
}};

}}  // namespace fastbert
"""


def write() -> None:
    HEADER.write_text(header(), encoding="utf-8")
