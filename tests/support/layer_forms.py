"""Layers of every form that ops.LayerForm describes: their operands, the op over them, and the literal formula."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from seeds import torch_generator

from fastbert import ops
from fastbert.testing import reference

HIDDEN, INTERMEDIATE, HEAD_DIM = 48, 72, 16
LENGTHS = (5, 1, 12, 0, 33)
TOKENS = sum(LENGTHS)
CU_SEQLENS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)

MERGED: dict[str, bool] = {"merged_qkv": True, "gated": True, "merged_gate": True}
POST = ops.LayerForm(num_heads=4, num_kv_heads=4, head_dim=HEAD_DIM, eps=(1e-5, 1e-6))
PRE = POST._replace(norm_first=True)
RMS = PRE._replace(norm="rms")


@dataclass(frozen=True)
class Case:
    """`biases`: which Linears have one, by their place; None: all."""

    form: ops.LayerForm
    biases: tuple[int, ...] | None = None
    norm_biases: bool = True

    def with_dropouts(self, *dropouts: float) -> Case:
        return replace(self, form=self.form._replace(dropouts=dropouts))


CASES = {
    "post": Case(POST),
    "post, tanh": Case(POST._replace(activation="gelu_tanh", softmax_scale=0.4)),
    "post, no biases": Case(POST, (), False),
    "post, no attention norm": Case(POST._replace(has_attention_norm=False)),
    "post, merged": Case(POST._replace(merged_qkv=True, gated=True, merged_gate=True), (3,)),  # as in GTE
    "pre": Case(PRE),
    "pre, some biases": Case(PRE, (0, 2, 4)),
    "pre, no attention norm": Case(PRE._replace(has_attention_norm=False, merged_qkv=True), (), False),
    "pre, merged": Case(PRE._replace(merged_qkv=True, gated=True, merged_gate=True), (), False),  # as in ModernBERT
    "pre, two gates": Case(PRE._replace(gated=True, activation="silu")),
    "rms": Case(RMS._replace(gated=True, activation="silu"), (), False),  # as in EuroBERT
    "post, rms": Case(RMS._replace(norm_first=False), None, False),
    "post, grouped": Case(POST._replace(num_kv_heads=2)),
    "pre, grouped, merged": Case(PRE._replace(num_kv_heads=1, merged_qkv=True)),
    "post, rotary": Case(POST._replace(rotary=0)),
    "pre, local": Case(PRE._replace(window_size=(3, 2))),
    # As ModernBERT's first layer and its others, EuroBERT, nomic and RoFormer have it.
    "global": Case(PRE._replace(has_attention_norm=False, rotary=0, **MERGED), (), False),
    "local": Case(PRE._replace(window_size=(4, 4), rotary=1, **MERGED), (), False),
    "rms, grouped": Case(RMS._replace(num_kv_heads=2, rotary=0, gated=True, activation="silu"), (), False),
    "nomic": Case(POST._replace(merged_qkv=True, gated=True, rotary=0, activation="silu"), ()),
    "interleaved": Case(POST._replace(rotary=2)),
}


# Tables by position, of another theta, and by token and interleaved; and positions with holes.
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])
WITH_HOLES = POSITIONS + POSITIONS // 4


def rotary_tables(dtype: torch.dtype = torch.float32) -> tuple[ops.Rotary, ...]:
    """cos and sin are float32's numbers in any dtype."""

    def table(theta: float, positions: torch.Tensor, *kind: bool) -> ops.Rotary:
        angles = positions[:, None] * theta ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
        return ops.Rotary(angles.cos().to(dtype), angles.sin().to(dtype), *kind)

    longest = torch.arange(max(LENGTHS))
    return table(1e4, longest), table(100.0, longest), table(50.0, WITH_HOLES, True, True)


@dataclass
class Layer:
    form: ops.LayerForm
    linears: list[ops.LinearWeights]
    norms: list[torch.Tensor | None]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that take a gradient, by name."""
        named = {f"weight {i}": leaf.weight for i, leaf in enumerate(self.linears)}
        named |= {f"norm {i}": t for i, t in enumerate(self.norms) if t is not None}
        return named | {f"bias {i}": leaf.bias for i, leaf in enumerate(self.linears) if leaf.bias is not None}

    def map(self, f) -> Layer:
        """f over the tensors, but for int8 and its scales."""

        def over(t):
            return t if t is None or t.dtype is torch.int8 else f(t)

        linears = [leaf._replace(weight=over(leaf.weight), bias=over(leaf.bias)) for leaf in self.linears]
        return Layer(self.form, linears, [over(t) for t in self.norms])

    def quantized(self) -> Layer:
        def int8(leaf: ops.LinearWeights, i: int) -> ops.LinearWeights:
            scale = leaf.weight.float().abs().amax(1) / 127
            integers = torch.round(leaf.weight.float() / scale[:, None]).to(torch.int8)
            return leaf._replace(
                weight=integers, weight_scale=scale, input_scale=torch.tensor(0.03) if i == 1 else None
            )

        return Layer(self.form, [int8(leaf, i) for i, leaf in enumerate(self.linears)], self.norms)


def make(case: Case, seed: int = 0) -> Layer:
    """In float32."""
    noise = torch_generator(seed)

    def random(*shape: int, scale: float = 1.0, around: float = 0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=noise) * scale + around

    form = case.form
    width, kv_width = form.num_heads * HEAD_DIM, form.num_kv_heads * HEAD_DIM
    projections = [width + 2 * kv_width] if form.merged_qkv else [width, kv_width, kv_width]
    ups = [INTERMEDIATE] * (1 + form.gated)
    ups = [sum(ups)] if form.merged_gate else ups
    shapes = [(n, HIDDEN) for n in projections] + [(HIDDEN, width)] + [(n, HIDDEN) for n in ups]
    linears = []
    for i, (out_features, in_features) in enumerate([*shapes, (HIDDEN, INTERMEDIATE)]):
        weight, bias = random(out_features, in_features, scale=in_features**-0.5), random(out_features, scale=0.3)
        has_bias = case.biases is None or i in case.biases
        linears.append(ops.LinearWeights(weight, bias if has_bias else None, None, None))
    norms: list[torch.Tensor | None] = []
    for is_there in (form.has_attention_norm, True):
        weight, bias = random(HIDDEN, scale=0.3, around=1.0), random(HIDDEN, scale=0.3)
        norms += [weight if is_there else None, bias if is_there and case.norm_biases else None]
    return Layer(form, linears, norms)


def make_final_norm(kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    noise = torch_generator(99)
    weight, bias = torch.randn(2, HIDDEN, generator=noise)
    return weight + 3, None if kind == "rms" else bias


def fused(op: str, layers: list[Layer], x: torch.Tensor, final_norm=None, cu_seqlens=CU_SEQLENS, positions=None):
    """The layers as one op; a refusal is an error. `positions`: those that windows go by."""
    found = ops.offer(op, x, lambda: operands_of(layers, final_norm))
    assert callable(found), found
    return found(cu_seqlens, rotary_tables(), None if positions is None else positions.int())


def operands_of(layers: list[Layer], final_norm=None) -> ops.LayerOperands:
    linears = [leaf for layer in layers for leaf in layer.linears]
    norms = [t for layer in layers for t in layer.norms]
    final = None if final_norm is None else ops.FinalNorm(*final_norm, 1e-5)
    return ops.LayerOperands.of(linears, norms, [layer.form for layer in layers], final)


def literal(layers: list[Layer], x: torch.Tensor, final_norm=None, cu_seqlens=CU_SEQLENS, positions=None, **keeps):
    tables = rotary_tables(torch.promote_types(x.dtype, torch.float32))
    for layer in layers:
        leaves = layer.linears, layer.norms
        x = reference.encoder_layer(x, layer.form, *leaves, cu_seqlens, tables, positions, **keeps)
    if final_norm is not None:
        weight, bias = final_norm
        is_rms = layers[-1].form.norm == "rms"
        x = reference.rms_norm(x, weight, 1e-5) if is_rms else reference.layer_norm(x, weight, bias, 1e-5)
    return x


def apart(layers: list[Layer], x: torch.Tensor, final_norm=None, cu_seqlens=CU_SEQLENS, positions=None) -> torch.Tensor:
    """The layers op by op, each of which chooses its backend, for inference."""

    def normed(x, residual, weight, bias, eps, x_bias=None):
        """The norm, and the sum before it."""
        options = {"x_bias": x_bias, "eps": eps, "prenorm": True}
        if form.norm == "rms":
            return ops.add_rms_norm(x, residual, weight, **options)
        return ops.add_layer_norm(x, residual, weight, bias, **options)

    def add(product, bias, residual):
        """In fp32, and rounded once, as norms' kernels do it."""
        summed = product.float() if bias is None else product.float() + bias.float()
        return (summed + residual.float()).to(x.dtype)

    tables = rotary_tables()
    for layer in layers:
        form, (weight, bias, next_weight, next_bias) = layer.form, layer.norms
        *projections, output = layer.linears[: 2 if form.merged_qkv else 4]
        *ups, down = layer.linears[len(projections) + 1 :]
        inputs = normed(x, None, weight, bias, form.eps[0])[0] if form.norm_first and weight is not None else x
        weights, biases, scales, input_scales = zip(*projections, strict=True)
        heads = ops.linears(inputs, weights, biases, weight_scales=scales, input_scales=input_scales)
        q, k, v = torch.cat(heads, 1).view(len(x), -1, HEAD_DIM).split((form.num_heads, *[form.num_kv_heads] * 2), 1)
        context = ops.attention(
            q, k, v, cu_seqlens, max(LENGTHS), softmax_scale=form.softmax_scale, window_size=form.window_size,
            window_positions=None if positions is None else positions.int(),
            rotary=tables[form.rotary] if form.rotary >= 0 else None,
        ).flatten(1)  # fmt: skip
        product = ops.linear(
            context, output.weight, None, weight_scale=output.weight_scale, input_scale=output.input_scale
        )
        if form.norm_first:
            inputs, x = normed(product, x, next_weight, next_bias, form.eps[1], output.bias)
        else:
            x = add(product, output.bias, x)
            inputs = x = x if weight is None else normed(x, None, weight, bias, form.eps[0])[0]
        up = ups[-1]
        gate = {"gate_weight": ups[0].weight, "gate_bias": ups[0].bias} if len(ups) == 2 else {}
        product = ops.feed_forward(
            inputs, up.weight, up.bias, down.weight, activation=form.activation, gated=form.gated, **gate,
            weight_scales=[leaf.weight_scale for leaf in (*ups, down)],
            input_scales=[leaf.input_scale for leaf in (*ups, down)],
        )  # fmt: skip
        x = add(product, down.bias, x)
        x = x if form.norm_first else normed(x, None, next_weight, next_bias, form.eps[1])[0]
    return x if final_norm is None else normed(x, None, *final_norm, 1e-5)[0]
