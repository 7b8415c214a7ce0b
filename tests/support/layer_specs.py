"""Layers of every kind of LayerSpec: their operands, the op over them, and the literal formula."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from relative_cases import ROWS, rows_of
from seeds import torch_generator

from fastbert import ops
from fastbert.layer_spec import (
    NORMS,
    AttentionSpec,
    Disentangled,
    FeedForwardSpec,
    LayerNames,
    LayerSpec,
    NormSpec,
    NormType,
    RelativeBias,
    RotarySpec,
)
from fastbert.testing import reference

HIDDEN, INTERMEDIATE, HEAD_DIM = 48, 72, 16
LENGTHS = (5, 1, 12, 0, 33)
TOKENS = sum(LENGTHS)
CU_SEQLENS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
NUM_KEYS = CU_SEQLENS.diff() // 2  # where some tokens attend alone

EPS = (1e-5, 1e-6, 1e-4, 2e-5, 3e-5, 4e-6)  # by the order of NORMS
# Of the tables of a call: by position, of another theta, and by token and interleaved.
ROTARIES = (RotarySpec(1e4, HEAD_DIM), RotarySpec(100.0, HEAD_DIM), RotarySpec(50.0, HEAD_DIM, interleaved=True))


def spec_of(
    *,
    merged_qkv: bool = False,
    merged_gate: bool = False,
    gated: bool = False,
    activation: str = "gelu",
    norm: NormType = "layer",
    head_norm: NormType | None = None,
    has_output_norms: bool = False,
    norm_first: bool = False,
    has_attention_norm: bool = True,
    relatives: tuple[str, ...] = (),
    **attention: Any,
) -> LayerSpec:
    projections = dict.fromkeys(("query", "key", "value"), "qkv") if merged_qkv else {}
    projections |= {name: name for name in relatives}
    others = () if head_norm is None else ("query_norm", "key_norm")
    others += ("attention_output_norm", "feed_forward_output_norm") if has_output_norms else ()
    projections |= {name: name for name in others}
    names = LayerNames(**projections, up="up", gate=None if not gated else "up" if merged_gate else "gate")
    return LayerSpec(
        names,
        AttentionSpec(
            **{"num_heads": 4, "num_kv_heads": 4, "head_dim": HEAD_DIM, **attention},
            norm=None if head_norm is None else NormSpec(head_norm),
        ),
        FeedForwardSpec(INTERMEDIATE, activation, gated),
        NormSpec(norm),
        norm_first,
        has_attention_norm,
    )


PRE: dict[str, Any] = {"norm_first": True}
RMS: dict[str, Any] = {"norm_first": True, "norm": "rms"}
MERGED: dict[str, Any] = {"merged_qkv": True, "gated": True, "merged_gate": True}
SILU: dict[str, Any] = {"gated": True, "activation": "silu"}
GEMMA: dict[str, Any] = {"gated": True, "activation": "gelu_tanh", "norm_first": True, "has_output_norms": True}
GEMMA |= {"norm": "zero_centered_rms", "head_norm": "zero_centered_rms"}
LOCAL: dict[str, Any] = {"window_size": (4, 4), "position": ROTARIES[1]}
DISENTANGLED: dict[str, Any] = {"position": Disentangled("table", 16), "softmax_scale": (3 * HEAD_DIM) ** -0.5}


@dataclass(frozen=True)
class Case:
    """`biases`: which Linears have one, by their place; None: all."""

    spec: LayerSpec
    biases: tuple[int, ...] | None = None
    norm_biases: bool = True

    def with_dropouts(self, *dropouts: float) -> Case:
        """`dropouts`: all but the one of a table of distances, which is dropped before the op."""
        return replace(self, spec=self.spec.with_dropouts(dict(zip(self.spec.dropouts, dropouts, strict=False))))


CASES = {
    "post": Case(spec_of()),
    "post, tanh": Case(spec_of(activation="gelu_tanh", softmax_scale=0.4)),
    "post, no biases": Case(spec_of(), (), False),
    "post, no attention norm": Case(spec_of(has_attention_norm=False)),
    "post, merged": Case(spec_of(**MERGED), (3,)),  # as in GTE
    "pre": Case(spec_of(**PRE)),
    "pre, some biases": Case(spec_of(**PRE), (0, 2, 4)),
    "pre, no attention norm": Case(spec_of(**PRE, has_attention_norm=False, merged_qkv=True), (), False),
    "pre, merged": Case(spec_of(**PRE, **MERGED), (), False),  # as in ModernBERT
    "pre, two gates": Case(spec_of(**PRE, **SILU)),
    "rms": Case(spec_of(**RMS, **SILU), (), False),  # as in EuroBERT
    "post, rms": Case(spec_of(norm="rms"), None, False),
    "post, grouped": Case(spec_of(num_kv_heads=2)),
    "pre, grouped, merged": Case(spec_of(**PRE, num_kv_heads=1, merged_qkv=True)),
    "post, rotary": Case(spec_of(position=ROTARIES[0])),
    "pre, local": Case(spec_of(**PRE, window_size=(3, 2))),
    # As ModernBERT's first layer and its others, EuroBERT, nomic and RoFormer have it.
    "global": Case(spec_of(**PRE, **MERGED, has_attention_norm=False, position=ROTARIES[0]), (), False),
    "local": Case(spec_of(**PRE, **MERGED, **LOCAL), (), False),
    "rms, grouped": Case(spec_of(**RMS, **SILU, num_kv_heads=2, position=ROTARIES[0]), (), False),
    "nomic": Case(spec_of(**SILU, merged_qkv=True, position=ROTARIES[0]), ()),
    "interleaved": Case(spec_of(position=ROTARIES[2])),
    # As DeBERTa and MPNet have it, of which softmax does not see a key's bias; and as no family does.
    "disentangled": Case(spec_of(**DISENTANGLED, relatives=("relative_key", "relative_query"))),
    # As Qwen3 and Gemma 3 have it; and as no family does, with LayerNorms that have biases.
    "qwen3": Case(
        spec_of(**RMS, **SILU, head_norm="rms", num_kv_heads=2, position=ROTARIES[0], window_size=(-1, 0)), (), False
    ),
    "gemma3": Case(spec_of(**GEMMA, **LOCAL, num_kv_heads=1, softmax_scale=0.4), (), False),
    "post, normed heads": Case(spec_of(head_norm="layer", has_output_norms=True)),
    "bias by distance": Case(spec_of(position=RelativeBias("table", 32)), (0, 2, 3, 4, 5)),
    "pre, disentangled": Case(
        spec_of(**PRE, **DISENTANGLED, merged_qkv=True, window_size=(9, 6), relatives=("relative_query",))
    ),
}


# Positions with holes, by which the last one of ROTARIES turns.
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])
WITH_HOLES = POSITIONS + POSITIONS // 4

KIND_OF_ROWS = "buckets"
RELATIVE_ROWS = rows_of(KIND_OF_ROWS, max(LENGTHS) + 3)


def rotary_tables(dtype: torch.dtype = torch.float32) -> tuple[ops.Rotary, ...]:
    """cos and sin are float32's numbers in any dtype."""

    def table(theta: float, positions: torch.Tensor, *kind: bool) -> ops.Rotary:
        angles = positions[:, None] * theta ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
        return ops.Rotary(angles.cos().to(dtype), angles.sin().to(dtype), *kind)

    longest = torch.arange(max(LENGTHS))
    places = (longest, longest, WITH_HOLES)
    kinds = [(spec.theta, at, spec.interleaved, at is WITH_HOLES) for spec, at in zip(ROTARIES, places, strict=True)]
    return tuple(table(*kind) for kind in kinds)


@dataclass
class Layer:
    spec: LayerSpec
    linears: list[ops.LinearWeights]
    norms: list[ops.NormWeights | None]
    tables: dict[str, torch.Tensor] = field(default_factory=dict)  # of ops.Relative, by name

    def relative(self, rows: torch.Tensor) -> ops.Relative | None:
        return ops.Relative(rows, **self.tables) if self.tables else None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that take a gradient, by name."""
        named = {f"weight {i}": leaf.weight for i, leaf in enumerate(self.linears)}
        of_norms = [t for norm in self.norms for t in (norm or (None, None))[:2]]
        named |= {f"norm {i}": t for i, t in enumerate(of_norms) if t is not None}
        named |= {f"bias {i}": leaf.bias for i, leaf in enumerate(self.linears) if leaf.bias is not None}
        return named | {f"relative {name}": t for name, t in self.tables.items()}

    def map(self, f) -> Layer:
        """f over the tensors, but for int8 and its scales."""

        def over(t):
            return t if t is None or t.dtype is torch.int8 else f(t)

        linears = [leaf._replace(weight=over(leaf.weight), bias=over(leaf.bias)) for leaf in self.linears]
        norms = [norm and norm._replace(weight=over(norm.weight), bias=over(norm.bias)) for norm in self.norms]
        return Layer(self.spec, linears, norms, {name: f(t) for name, t in self.tables.items()})

    def quantized(self) -> Layer:
        def int8(leaf: ops.LinearWeights, i: int) -> ops.LinearWeights:
            scale = leaf.weight.float().abs().amax(1) / 127
            integers = torch.round(leaf.weight.float() / scale[:, None]).to(torch.int8)
            return leaf._replace(
                weight=integers, weight_scale=scale, input_scale=torch.tensor(0.03) if i == 1 else None
            )

        return Layer(self.spec, [int8(leaf, i) for i, leaf in enumerate(self.linears)], self.norms, self.tables)


def make(case: Case, seed: int = 0) -> Layer:
    """In float32."""
    noise = torch_generator(seed)

    def random(*shape: int, scale: float = 1.0, around: float = 0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=noise) * scale + around

    spec, attention = case.spec, case.spec.attention
    width, kv_width = attention.num_heads * HEAD_DIM, attention.num_kv_heads * HEAD_DIM
    projections = [width + 2 * kv_width] if spec.merges_qkv else [width, kv_width, kv_width]
    ups = [INTERMEDIATE] * (1 + spec.feed_forward.gated)
    ups = [sum(ups)] if spec.merges_gate else ups
    shapes = [(n, HIDDEN) for n in projections] + [(HIDDEN, width)] + [(n, HIDDEN) for n in ups]
    linears = []
    for i, (out_features, in_features) in enumerate([*shapes, (HIDDEN, INTERMEDIATE)]):
        weight, bias = random(out_features, in_features, scale=in_features**-0.5), random(out_features, scale=0.3)
        has_bias = case.biases is None or i in case.biases
        linears.append(ops.LinearWeights(weight, bias if has_bias else None, None, None))
    norms: list[ops.NormWeights | None] = []
    for i, (path, eps) in enumerate(zip(spec.norm_paths, EPS, strict=False)):
        if path is None and i > 1:  # what is drawn for the others stays as it was
            norms.append(None)
            continue
        features = HEAD_DIM if NORMS[i] in ("query_norm", "key_norm") else HIDDEN
        around = 0.0 if spec.norm_of(i).type == "zero_centered_rms" else 1.0
        weight, bias = random(features, scale=0.3, around=around), random(features, scale=0.3)
        norms.append(ops.NormWeights(weight, bias if case.norm_biases else None, eps) if path is not None else None)
    num_rows, num_heads = ROWS[KIND_OF_ROWS][0], attention.num_heads
    tables = {}
    for bit, (name, shape) in enumerate((("key", (HEAD_DIM,)), ("query", (HEAD_DIM,)), ("bias", ()))):
        if spec.relative_bits >> bit & 1:
            tables[name] = random(num_rows, num_heads, *shape)
    return Layer(spec, linears, norms, tables)


def make_final_norm(kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    noise = torch_generator(99)
    weight, bias = torch.randn(2, HIDDEN, generator=noise)
    return weight + 3, bias if kind == "layer" else None


def fused(
    op: str, layers: list[Layer], x: torch.Tensor, final_norm=None, cu_seqlens=CU_SEQLENS, positions=None, num_keys=None
):
    """The layers as one op; a refusal is an error. `positions`: those that windows go by."""
    found = ops.try_fused(op, x, lambda: operands_of(layers, final_norm))
    assert callable(found), found
    relative = [ops.Relative(RELATIVE_ROWS, **layer.tables) for layer in layers if layer.tables]
    relative = [terms.to(ops.compute_dtype(x)) for terms in relative]
    return found(cu_seqlens, rotary_tables(), None if positions is None else positions.int(), relative, num_keys)


def operands_of(layers: list[Layer], final_norm=None, rotaries=ROTARIES) -> ops.LayerOperands:
    given = [ops.LayerWeights(layer.spec, layer.linears, layer.norms, trains=True) for layer in layers]
    return ops.LayerOperands.of(given, rotaries, None if final_norm is None else ops.NormWeights(*final_norm, 1e-5))


def relative_lists_of(layers: list[Layer], dtype: torch.dtype) -> tuple[torch.Tensor | None, None, list[torch.Tensor]]:
    """relative_rows, relative_positions and relative, as the registered ops take them for products in `dtype`."""
    terms = [t if name == "bias" else t.to(dtype) for layer in layers for name, t in layer.tables.items()]
    return RELATIVE_ROWS if terms else None, None, terms


def literal(layers: list[Layer], x: torch.Tensor, final_norm=None, cu_seqlens=CU_SEQLENS, positions=None, **keeps):
    tables = rotary_tables(torch.promote_types(x.dtype, torch.float32))
    for layer in layers:
        table = table_of(layer.spec, tables)
        x = reference.encoder_layer(
            x,
            layer.spec,
            layer.linears,
            layer.norms,
            cu_seqlens,
            table,
            positions,
            relative=layer.relative(RELATIVE_ROWS),
            **keeps,
        )
    if final_norm is not None:
        weight, bias = final_norm
        kind = layers[-1].spec.norm.type
        weight = 1 + weight if kind == "zero_centered_rms" else weight
        x = reference.layer_norm(x, weight, bias, 1e-5) if kind == "layer" else reference.rms_norm(x, weight, 1e-5)
    return x


def table_of(spec: LayerSpec, tables: tuple[ops.Rotary, ...]) -> ops.Rotary | None:
    position = spec.attention.rotary
    return None if position is None else tables[ROTARIES.index(position)]


def _add(product: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """In fp32, and rounded once, as norms' kernels do it."""
    summed = product.float() if bias is None else product.float() + bias.float()
    return (summed + residual.float()).to(residual.dtype)


def apart(layers: list[Layer], x: torch.Tensor, final_norm=None, cu_seqlens=CU_SEQLENS, positions=None) -> torch.Tensor:
    """The layers op by op, each of which chooses its backend, for inference."""

    def normed(x, residual, weight, bias, eps, x_bias=None, which=0):
        """The norm, and the sum before it."""
        options, kind = {"x_bias": x_bias, "eps": eps, "prenorm": True}, spec.norm_of(which).type
        if kind != "layer":
            centered = kind == "zero_centered_rms"
            return ops.add_rms_norm(x, residual, weight, zero_centered_weight=centered, **options)
        return ops.add_layer_norm(x, residual, weight, bias, **options)

    def of_heads(x, which):
        norm = layer.norms[which] if which < len(layer.norms) else None
        return x if norm is None else normed(x.reshape(-1, HEAD_DIM), None, *norm, which=which)[0].view(x.shape)

    def output(product, bias, which):
        """A product and its bias, or the norm of both."""
        norm = layer.norms[which] if which < len(layer.norms) else None
        return (product, bias) if norm is None else (normed(product, None, *norm, bias, which=which)[0], None)

    tables = rotary_tables()
    for layer in layers:
        spec, attention, (first, second) = layer.spec, layer.spec.attention, layer.norms[:2]
        projections, (last, *ups, down) = layer.linears[: len(spec.names.qkv)], layer.linears[len(spec.names.qkv) :]
        inputs = normed(x, None, *first)[0] if spec.norm_first and first is not None else x
        weights, biases, scales, input_scales = zip(*projections, strict=True)
        heads = ops.linears(inputs, weights, biases, weight_scales=scales, input_scales=input_scales)
        counts = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
        q, k, v = torch.cat(heads, 1).view(len(x), -1, HEAD_DIM).split(counts, 1)
        context = ops.attention(
            of_heads(q, 2),
            of_heads(k, 3),
            v,
            cu_seqlens,
            max(LENGTHS),
            softmax_scale=attention.softmax_scale,
            window_size=attention.window_size,
            window_positions=None if positions is None else positions.int(),
            rotary=table_of(spec, tables),
            relative=layer.relative(RELATIVE_ROWS),
        ).flatten(1)
        product = ops.linear(context, last.weight, None, weight_scale=last.weight_scale, input_scale=last.input_scale)
        product, bias = output(product, last.bias, 4)
        if spec.norm_first:
            inputs, x = normed(product, x, *second, bias)
        else:
            x = _add(product, bias, x)
            inputs = x = x if first is None else normed(x, None, *first)[0]
        up = ups[-1]
        gate = {"gate_weight": ups[0].weight, "gate_bias": ups[0].bias} if len(ups) == 2 else {}
        product = ops.feed_forward(
            inputs,
            up.weight,
            up.bias,
            down.weight,
            **gate,
            activation=spec.feed_forward.activation,
            gated=spec.feed_forward.gated,
            weight_scales=[leaf.weight_scale for leaf in (*ups, down)],
            input_scales=[leaf.input_scale for leaf in (*ups, down)],
        )
        x = _add(*output(product, down.bias, 5), x)
        x = x if spec.norm_first else normed(x, None, *second)[0]
    return x if final_norm is None else normed(x, None, *final_norm, 1e-5)[0]
