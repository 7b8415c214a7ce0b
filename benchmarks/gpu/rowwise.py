"""Ops over rows on their own device: feed-forward, merged products, losses, embeddings and dropout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.checks import (
    Checks,
    Tensors,
    Where,
    assert_keep_rate,
    compare,
    differentiate,
    feed_forward_operands,
    feed_forward_plans,
    has_kernel,
    isolates_rows,
    planned,
    repeats,
)
from fastbert import ops
from fastbert.backend import use_backend
from fastbert.layer_spec import AttentionSpec, FeedForwardSpec, LayerNames, LayerSpec, NormSpec
from fastbert.testing import reference
from fastbert.testing.numerics import assert_close_to_reference

# --------------------------------------------------------------------------------------------------------------------
# feed_forward


def feed_forward_case(
    where: Where, plan: object, shape: tuple[int, int, int], activation: str, has_bias: bool = True, gated: bool = False
) -> None:
    tensors = feed_forward_operands(where, *shape, gated)
    ours = partial(ops.feed_forward, activation=activation, gated=gated, backend=where.backend)
    literal = partial(reference.feed_forward, name=activation, gated=gated)
    if not has_bias:
        tensors.pop("up_bias")
        ours, literal = partial(ours, up_bias=None), partial(literal, up_bias=None)
    with planned(plan):
        compare(ours, literal, tensors)
        repeats(ours, tensors)


def feed_forward_elementwise(where: Where) -> Checks:
    plan = feed_forward_plans(where)["elementwise"]
    for shape in where.choose(((17, 33, 40),), ((1, 768, 3072), (1000, 384, 1536), (16384, 768, 3072))):
        yield _shape_id(shape), partial(feed_forward_case, where, plan, shape, "gelu")
    yield from _feed_forward_features(where, plan)
    yield from _gated(where, [plan])


def feed_forward_epilogue(where: Where) -> Checks:
    plans, gated_plans = (
        [plan for name, plan in feed_forward_plans(where, gated).items() if name != "elementwise"]
        for gated in (False, True)
    )
    for i, plan in enumerate(plans):
        large = ((4099, 1024, 4096), *(((16384, 768, 3072),) if i == 0 else ()))
        for shape in where.choose(((17, 33, 40),), large):
            yield f"{i} {_shape_id(shape)}", partial(feed_forward_case, where, plan, shape, "gelu")
    yield from _feed_forward_features(where, plans[0])
    yield from _gated(where, gated_plans)


def _gated(where: Where, plans: list[object]) -> Checks:
    """ModernBERT's sizes (base, large), which have no bias, and every activation with one."""
    for i, plan in enumerate(plans):
        for shape in where.choose(((17, 33, 40),), ((8193, 768, 1152), (4099, 1024, 2624))):
            yield f"gated {i} {_shape_id(shape)}", partial(feed_forward_case, where, plan, shape, "gelu", False, True)
    shape = where.choose((17, 33, 40), (1025, 768, 1152))
    for activation in where.choose(("silu",), ("gelu", "gelu_tanh", "relu", "silu", "tanh")):
        yield f"gated {activation}", partial(feed_forward_case, where, plans[0], shape, activation, True, True)
    for has_bias in (True, False):
        name = f"gate and up apart{'' if has_bias else ', no bias'}"
        yield name, partial(_feed_forward_apart, where, plans[0], shape, has_bias)


def _feed_forward_apart(where: Where, plan: object, shape: tuple[int, int, int], has_bias: bool) -> None:
    """Gate and up as two Linears, as Llama's checkpoints have them."""
    tensors = feed_forward_operands(where, *shape)
    tensors["gate_weight"] = where.randn(*tensors["up_weight"].shape, scale=shape[1] ** -0.5, seed=4)
    tensors["gate_bias"] = where.randn(shape[2], seed=5)
    ours = partial(ops.feed_forward, activation="silu", gated=True, backend=where.backend)
    literal = partial(reference.feed_forward, name="silu", gated=True)
    if not has_bias:
        tensors = {name: t for name, t in tensors.items() if not name.endswith("bias")}
        ours, literal = partial(ours, up_bias=None), partial(literal, up_bias=None)
    with planned(plan):
        compare(ours, literal, tensors)
        repeats(ours, tensors)


def _shape_id(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _feed_forward_features(where: Where, plan: object) -> Checks:
    shape = where.choose((17, 33, 40), (1025, 768, 3072))
    for activation in where.choose(("gelu_tanh",), ("gelu_tanh", "relu", "silu", "tanh")):
        yield activation, partial(feed_forward_case, where, plan, shape, activation)
    yield "no bias", partial(feed_forward_case, where, plan, shape, "gelu", False)

    def isolation() -> None:
        # On a CPU torch's own products may mix rows of other sizes, with AMX (fastbert/ops/linear/torch_backend.py):
        # that is no fault of the kernels under test, which run in the interpreter there.
        sizes = (17, 32, 64) if where.device.type == "cpu" else shape
        with planned(plan):
            isolates_rows(partial(ops.feed_forward, backend=where.backend), feed_forward_operands(where, *sizes))

    yield "isolation", isolation


# --------------------------------------------------------------------------------------------------------------------
# cross_entropy


def _cross_entropy_case(where: Where, rows: int, hidden_size: int, classes: int, labelled: int, **options) -> None:
    labels = torch.full((rows,), -100, device=where.device)
    chosen = torch.linspace(0, rows - 1, labelled).long().to(where.device)
    labels[chosen] = where.integers(classes, labelled)
    tensors = {
        "hidden_states": where.randn(rows, hidden_size),
        "weight": where.randn(classes, hidden_size, scale=hidden_size**-0.5, seed=1),
        "bias": where.randn(classes, seed=2),
    }
    ours = partial(ops.cross_entropy, labels=labels, backend=where.backend, **options)
    compare(ours, partial(reference.cross_entropy, labels=labels, **options), tensors)
    repeats(ours, tensors)


def cross_entropy(where: Where) -> Checks:
    shapes: tuple[tuple[int, int, int, int], ...] = where.choose(
        ((9, 16, 37, 5),), ((9, 64, 37, 5), (65536, 768, 30522, 300), (4096, 1024, 30522, 250))
    )
    for shape in shapes:
        yield "x".join(map(str, shape)), partial(_cross_entropy_case, where, *shape)
    rows, hidden_size, classes, labelled = shapes[0]
    smoothed = partial(_cross_entropy_case, label_smoothing=0.1, z_loss=1e-3)
    yield "smoothing and z-loss", partial(smoothed, where, rows, hidden_size, classes, labelled)
    yield "no label", partial(_cross_entropy_case, where, rows, hidden_size, classes, 0)


def _masked_lm_loss_case(where: Where, rows: int, hidden_size: int, classes: int, labelled: int) -> None:
    """With a row without a label among those that are picked, as slack is. The word table scores words."""
    labels = torch.full((rows,), -100, device=where.device)
    indices = torch.linspace(0, rows - 1, labelled + 1).long().to(where.device)
    labels[indices[:-1]] = where.integers(classes, labelled)
    tensors = {
        "x": where.randn(rows, hidden_size),
        "dense": where.randn(hidden_size, hidden_size, scale=hidden_size**-0.5, seed=1),
        "dense_bias": where.randn(hidden_size, seed=2),
        "weight": where.randn(hidden_size, seed=3),
        "bias": where.randn(hidden_size, seed=4),
        "table": where.randn(classes, hidden_size, scale=hidden_size**-0.5, seed=5),
        "table_bias": where.randn(classes, seed=6),
    }

    def run(x: torch.Tensor, is_ours: bool = False, **t: torch.Tensor) -> torch.Tensor:
        if not is_ours:
            inner = torch.nn.functional.gelu(torch.nn.functional.linear(x[indices], t["dense"], t["dense_bias"]))
            out = reference.layer_norm(inner, t["weight"], t["bias"], 1e-5)
            return reference.cross_entropy(out, t["table"], t["table_bias"], labels[indices])
        dense = ops.LinearWeights(t["dense"], t["dense_bias"], None, None)
        norm = ops.NormWeights(t["weight"], t["bias"], 1e-5)
        given = ops.MaskedLMOperands(dense, "gelu", norm, t["table"], t["table_bias"])
        with use_backend(where.backend):
            found = ops.try_fused("masked_lm_loss", x, lambda: given)
        return found(indices, labels)

    compare(partial(run, is_ours=True), run, tensors, infers=False)
    repeats(partial(run, is_ours=True), tensors)


def masked_lm_loss(where: Where) -> Checks:
    shapes: tuple[tuple[int, int, int, int], ...] = where.choose(
        ((9, 16, 37, 5),), ((9, 64, 37, 5), (16384, 768, 30522, 2400))
    )
    for shape in shapes:
        yield "x".join(map(str, shape)), partial(_masked_lm_loss_case, where, *shape)


# --------------------------------------------------------------------------------------------------------------------
# embed_layer_norm


def _table_rows(where: Where) -> tuple[int, int]:
    """Of words, and of positions."""
    rows: tuple[int, int] = where.choose((40, 20), (3000, 512))
    return rows


def _embed_operands(where: Where, width: int) -> Tensors:
    words, positions = _table_rows(where)
    tables = {"word": words, "position": positions, "token_type": 2}
    matrices = {name: where.randn(rows, width, seed=rows) for name, rows in tables.items()}
    return {**matrices, "weight": where.randn(width, seed=1), "bias": where.randn(width, seed=5)}


def _embed_case(where: Where, rows: int, width: int) -> None:
    """With and without token types and LayerNorm."""
    ids, positions = (where.integers(n, rows, seed=i) for i, n in enumerate(_table_rows(where)))
    tensors = _embed_operands(where, width)
    variants: tuple[tuple[torch.Tensor | None, tuple[str, ...]], ...] = (
        (where.integers(2, rows), ()),
        (None, ("token_type",)),
        (None, ()),
        (where.integers(2, rows), ("weight", "bias")),
    )
    for types, absent in variants:
        given: dict[str, Any] = dict.fromkeys(absent)
        present = {name: t for name, t in tensors.items() if name not in absent}
        ours = partial(ops.embed_layer_norm, ids, positions, types, eps=1e-5, backend=where.backend, **given)
        literal = partial(reference.embed_layer_norm, ids, positions, types, eps=1e-5, **given)
        compare(ours, literal, present)
        if has_kernel(where) and types is not None and not absent:
            repeats(ours, present)


def _embed_padding(where: Where) -> None:
    """The padding row takes no gradient, the others take theirs."""
    ids = torch.arange(6, device=where.device).repeat(where.choose(3, 20))
    tensors = _embed_operands(where, where.choose(16, 768))
    ours = partial(ops.embed_layer_norm, ids, ids, None, eps=1e-5, backend=where.backend)
    free, padded = (differentiate(partial(ours, padding_idx=row), tensors)["dword"] for row in (None, 3))
    assert free[3].any() and not padded[3].any(), "row padding_idx has a gradient"
    free[3] = 0
    assert torch.equal(free, padded) or not has_kernel(where), "padding_idx changes other rows' gradients"


def embed_layer_norm(where: Where) -> Checks:
    for rows, width in where.choose(((9, 48),), ((1, 64), (4097, 384), (16384, 768), (16384, 1024))):
        yield f"{rows}x{width}", partial(_embed_case, where, rows, width)
    yield "padding_idx", partial(_embed_padding, where)


# --------------------------------------------------------------------------------------------------------------------
# dropout


def _dropout_case(where: Where, rows: int, width: int, dropout_p: float) -> None:
    """The keep rate, the scale, the same mask in backward, one mask a seed."""
    x = where.randn(rows, width).abs() + 1

    def run(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        torch.manual_seed(seed)
        out = ops.dropout(leaf, dropout_p, backend=where.backend)
        return out.detach(), torch.autograd.grad(out, leaf, x)[0]

    out, gradient = run(3)
    assert torch.equal(out, gradient), "backward has another mask than forward"
    assert torch.equal(out, run(3)[0]) and not torch.equal(out, run(4)[0]), "masks do not follow the seed"
    assert_keep_rate(out != 0, dropout_p)
    expected = (x.double() / (1 - dropout_p))[out != 0]
    error = (out.double()[out != 0] - expected).abs() / expected
    assert error.max() <= 2 * torch.finfo(where.dtype).eps, "what is kept is not divided by the keep rate"


def dropout(where: Where) -> Checks:
    for dropout_p in (0.1, 0.5):
        rows, width = where.choose((33, 80), (16384, 768))
        yield f"{rows}x{width} p {dropout_p}", partial(_dropout_case, where, rows, width, dropout_p)


def _merged_case(where: Where, rows: int, hidden_size: int, has_bias: bool) -> None:
    tensors = {"x": where.randn(rows, hidden_size)}
    for i in range(3):
        tensors[f"weight{i}"] = where.randn(hidden_size, hidden_size, scale=hidden_size**-0.5, seed=i)
        if has_bias:
            tensors[f"bias{i}"] = where.randn(hidden_size, seed=3 + i)

    def ours(x, **parameters):
        weights, biases = ([parameters.get(f"{name}{i}") for i in range(3)] for name in ("weight", "bias"))
        with use_backend(where.backend):
            return torch.stack(ops.linears(x, weights, biases))

    def literal(x, **parameters):
        return torch.stack(
            [reference.linear(x, parameters[f"weight{i}"], parameters.get(f"bias{i}")) for i in range(3)]
        )

    compare(ours, literal, tensors)
    repeats(ours, tensors)


def merged_linears(where: Where) -> Checks:
    shape = where.choose((4096, 16), (8192, 768))  # inference merges as many rows, too
    for has_bias in (True, False):
        yield f"{shape}{'' if has_bias else ' without a bias'}", partial(_merged_case, where, *shape, has_bias)


# adamw_flat, which is in float32


def _torchs_adamw(weights: list[torch.Tensor], gradients: list[torch.Tensor], max_norm: float) -> None:
    """Two steps, in place."""
    leaves = [torch.nn.Parameter(weight) for weight in weights]
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, foreach=False)
    for factor in (1.0, -0.5):
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = (factor * gradient).to(leaf.dtype)
        torch.nn.utils.clip_grad_norm_(leaves, max_norm)
        optimizer.step()


def _adamw_case(where: Where, shapes: tuple[tuple[int, ...], ...], max_norm: float) -> None:
    """Against torch's in float64, twice over with the same bits."""

    def drawn(seed: int) -> list[torch.Tensor]:
        return [where.randn(*shape, seed=seed + i).float() for i, shape in enumerate(shapes)]

    gradients, runs = drawn(100), []
    for _ in range(2):
        weights = drawn(0)
        state = ops.FlatState(weights, [0] * len(weights))
        for step, factor in ((1, 1.0), (2, -0.5)):
            for view, gradient in zip(state.views(state.gradients), gradients, strict=True):
                view.copy_(factor * gradient)
            numbers = torch.tensor(ops.step_numbers(step, [1e-2], [0.1], 0.9, 0.99), device=where.device)
            options = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "max_norm": max_norm}
            ops.adamw_flat(state, numbers, backend=where.backend, **options)
        assert not state.gradients.any(), "gradients are left behind a step"
        runs.append(weights)
    baseline, oracle = drawn(0), [weight.double() for weight in drawn(0)]
    _torchs_adamw(baseline, gradients, max_norm)
    _torchs_adamw(oracle, gradients, max_norm)
    for i, found in enumerate(runs[0]):
        assert torch.equal(found, runs[1][i]), f"two runs differ in weight {i}"
        assert_close_to_reference(found, oracle[i], baseline[i], name=f"weight {i}")


def adamw_flat(where: Where) -> Checks:
    small: tuple[tuple[int, ...], ...] = ((50, 90), (1,), (2048,))
    shapes = where.choose(small, (*small, (30522, 768), (768, 3072), (768,)))
    for max_norm in (1.0, 1e6):
        yield f"max_norm {max_norm:g}", partial(_adamw_case, where, shapes, max_norm)


def _layers_case(where: Where, op: str, norm_first: bool) -> None:
    """Layers as one op: post-norm as BERT's, and pre-norm with a gate."""
    hidden, inner, head_dim, *lengths = where.choose((32, 48, 16, 5, 1, 0, 9), (768, 3072, 64, 300, 1, 0, 512))
    offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(where.device)
    attention, names = AttentionSpec(*[hidden // head_dim] * 2, head_dim), LayerNames(gate="g" if norm_first else None)
    spec = LayerSpec(names, attention, FeedForwardSpec(inner, "gelu", norm_first), NormSpec("layer"), norm_first)
    shapes = [(hidden, hidden)] * 4 + [(inner, hidden)] * (1 + norm_first) + [(hidden, inner)]
    tensors = {"x": where.randn(sum(lengths), hidden)} | {f"n{i}": where.randn(hidden, seed=i) for i in range(4)}
    for i, (rows, columns) in enumerate(shapes):
        tensors[f"w{i}"] = where.randn(rows, columns, scale=columns**-0.5, seed=5 + i)
        tensors |= {f"b{i}": where.randn(rows, seed=20 + i)} if i > 2 else {}  # a key's has a gradient of 0

    def run(x, is_ours=False, **t):
        linears = [ops.LinearWeights(t[f"w{i}"], t.get(f"b{i}"), None, None) for i in range(len(shapes))]
        norms = (ops.NormWeights(t["n0"], t["n1"], 1e-5), ops.NormWeights(t["n2"], t["n3"], 1e-5))
        if not is_ours:
            return reference.encoder_layer(x, spec, linears, norms, offsets)
        with use_backend(where.backend):
            found = ops.try_fused(op, x, lambda: ops.LayerOperands.of([ops.LayerWeights(spec, linears, norms)]))
        return found(offsets)

    compare(partial(run, is_ours=True), run, tensors, infers=False)
    repeats(partial(run, is_ours=True), tensors)


def layers(op: str, where: Where) -> Checks:
    return iter([(f"norm_first {first}", partial(_layers_case, where, op, first)) for first in (False, True)])


CHECKS: dict[str, Callable[[Where], Checks]] = {
    **{op: partial(layers, op) for op in ("encoder_layers_training", "encoder_layers_recomputing")},
    "adamw_flat": adamw_flat,
    "feed_forward/elementwise": feed_forward_elementwise,
    "feed_forward/epilogue": feed_forward_epilogue,
    "merged_linears": merged_linears,
    "cross_entropy": cross_entropy,
    "masked_lm_loss": masked_lm_loss,
    "embed_layer_norm": embed_layer_norm,
    "dropout": dropout,
}
