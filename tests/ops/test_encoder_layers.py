"""Stacks of layers of every kind as one op, in inference."""

from __future__ import annotations

import math
import re
from functools import partial

import pytest
import torch
from full import halved, left_to_full
from isas import CPU_BACKENDS, backend_with_isa
from layer_specs import (
    CASES,
    CU_SEQLENS,
    HIDDEN,
    NUM_KEYS,
    ROTARIES,
    TOKENS,
    WITH_HOLES,
    apart,
    fused,
    literal,
    make,
    make_final_norm,
    operands_of,
    relative_lists_of,
    rotary_tables,
    spec_of,
)
from seeds import torch_generator

from fastbert import ops
from fastbert.native.availability import extension_error
from fastbert.testing.cases import DTYPES
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

pytestmark = pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))

# Layers that follow each other in one stack: as in ModernBERT, and of both placements of norms.
STACKS = {name: (name, name) for name in CASES}
STACKS |= {"modernbert": ("global", "local", "local"), "mixed": ("pre", "post", "pre, no attention norm", "pre")}
STACKS |= {"mixed distances": ("disentangled", "post", "bias by distance")}


def make_stack(name: str, dtype: torch.dtype, final: bool = True):
    """Layers, x and the final norm, which post-norm stacks do not have."""
    layers = [make(CASES[each], seed).map(lambda t: t.to(dtype)) for seed, each in enumerate(STACKS[name])]
    x = torch.randn(TOKENS, HIDDEN, generator=torch_generator(1)).to(dtype)
    last = layers[-1].spec
    norm = [None if t is None else t.to(dtype) for t in make_final_norm(last.norm.type)]
    return layers, x, norm if final and last.norm_first else None


def check(name: str, dtype: torch.dtype, **shared) -> None:
    for final in (True, False):
        layers, x, norm = make_stack(name, dtype, final)
        before = x.clone()
        ours = fused("encoder_layers", layers, x, norm, **shared)
        assert torch.equal(x, before)
        wide = None if norm is None else [None if t is None else t.double() for t in norm]
        oracle = literal([layer.map(torch.Tensor.double) for layer in layers], x.double(), wide, **shared)
        assert_close_to_reference(ours, oracle, literal(layers, x, norm, **shared), GRADIENT_FACTOR, name)


@halved
@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STACKS)
def test_against_oracle(name, dtype):
    check(name, dtype)


@halved
@torch.no_grad()
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", ("modernbert", "mixed", "rms, grouped"))
def test_every_isa_windows_by_position_and_tokens_that_attend_alone(name, backend):
    with backend_with_isa(backend):
        for dtype in DTYPES:
            check(name, dtype, positions=WITH_HOLES)
            check(name, dtype, num_keys=NUM_KEYS)


@halved
@torch.no_grad()
@pytest.mark.parametrize("kind", ("float32", "bfloat16", "int8", "int8 in bfloat16"))
@pytest.mark.parametrize("name", STACKS)
def test_one_op_is_what_its_ops_are(name, kind):
    """Bit for bit."""
    layers, x, norm = make_stack(name, torch.bfloat16 if "bfloat16" in kind else torch.float32)
    if "int8" in kind:
        layers = [layer.quantized() for layer in layers]
    assert torch.equal(fused("encoder_layers", layers, x, norm), apart(layers, x, norm))


@torch.no_grad()
def test_number_of_threads():
    layers, x, norm = make_stack("modernbert", torch.float32)
    threads, found = torch.get_num_threads(), []
    for each in (1, 2, 3):
        torch.set_num_threads(each)
        found.append(fused("encoder_layers", layers, x, norm))
    torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@torch.no_grad()
@pytest.mark.parametrize("name", ("modernbert", "mixed", "post, merged"))
def test_no_tokens_and_slack(name):
    layers, x, norm = make_stack(name, torch.float32)
    assert fused("encoder_layers", layers, x[:0], norm, torch.zeros(3, dtype=torch.int32)).shape == (0, HIDDEN)
    with_capacity = fused("encoder_layers", layers, torch.cat([x, x[:7]]), norm)
    assert torch.equal(with_capacity[:TOKENS], fused("encoder_layers", layers, x, norm))
    assert torch.isfinite(with_capacity).all()


@torch.no_grad()
def test_rows_that_lie_apart():
    layers, x, norm = make_stack("pre", torch.float32)
    wide = torch.cat([x, x], 1)[:, :HIDDEN]
    assert torch.equal(fused("encoder_layers", layers, wide, norm), fused("encoder_layers", layers, x, norm))


REASONS = (
    (spec_of(head_dim=1), r"head_dim is 1 \(attention has 2 to 256\)"),
    (spec_of(head_dim=320), r"head_dim is 320 \(attention has 2 to 256\)"),
    (spec_of(num_kv_heads=3), "num_heads is 4, no multiple of num_kv_heads, which is 3"),
    (spec_of(softmax_scale=math.inf), "softmax_scale is inf"),
    (spec_of(position=ROTARIES[0]._replace(rotates_values=True)), "attention rotates values, too"),
    (spec_of(position=ROTARIES[0]._replace(dim=8)), "rotary embedding turns 8 of a head's 16 dimensions"),
    (spec_of(norm="batch"), "norm is 'batch'"),  # type: ignore[arg-type]
    (spec_of(activation="relu"), "layers have gelu and relu"),
)


@torch.no_grad()
@pytest.mark.parametrize(("spec", "reason"), REASONS, ids=range(len(REASONS)))
def test_reasons(spec, reason):
    layers, x, _ = make_stack("post", torch.float32)
    layers[0].spec = spec
    position = spec.attention.rotary
    rotaries = () if position is None else (position,)
    assert re.match(reason, ops.try_fused("encoder_layers", x, lambda: operands_of(layers, rotaries=rotaries)))


def test_operands_that_do_not_fit():
    layers, x, _ = make_stack("post", torch.float32)
    assert operands_of(layers, make_final_norm("layer")).unsupported == "there is a norm behind post-norm layers"
    with pytest.raises(ValueError, match="a layer has 5 Linears, and its spec 6"):
        layers[1].linears.pop()
        operands_of(layers)
    with torch.no_grad(), pytest.raises(RuntimeError, match="takes rotary table 0, the call has 0"):
        layers = [make(CASES["post, rotary"])]
        ops.try_fused("encoder_layers", x, lambda: operands_of(layers))(CU_SEQLENS)


def arguments(name: str, dtype: torch.dtype = torch.float32) -> tuple:
    """Of the registered op."""
    layers, x, norm = make_stack(name, dtype)
    *of_layers, _, _ = operands_of(layers, norm)
    tables = [t for table in rotary_tables() for t in table[:2]]
    shared = (tables, [0, 0, 3], WITH_HOLES.int(), NUM_KEYS)
    return x, CU_SEQLENS, *of_layers, *shared, *relative_lists_of(layers, dtype), []


@left_to_full(lambda p: p["name"] != "disentangled")  # others have less, and test_compiled traces "modernbert"
@pytest.mark.parametrize("name", ("modernbert", "post", "rms, grouped", "disentangled"))
def test_opcheck(name):
    torch.library.opcheck(torch.ops.fastbert.encoder_layers_cpu, arguments(name))


# By the arguments' places: weights, biases, norms, layers, ints, floats.
@pytest.mark.parametrize(
    ("at", "change", "message"),
    (
        (2, lambda weights: weights[:-1], "there are 11 weights, the layers have more"),
        (2, lambda weights: [*weights, weights[0]], "there are 1 weights, biases and weight_scales too many"),
        (2, lambda weights: [weights[1].t(), *weights[1:]], "weight 0 of layer 0 is"),
        (3, lambda biases: biases[:-1], "there are 11 biases, the layers have more"),
        (6, lambda norms: [*norms, norms[0]], "there are 1 tensors of norms too many"),
        (6, lambda norms: [norms[0][:5], *norms[1:]], "norm has shape"),
        (8, lambda layers: [0, 1], "there are no numbers 1"),
        (9, lambda ints: ints[1:], "a layer's numbers are 16 whole ones"),
        (10, lambda floats: floats[1:], "a layer's numbers are 16 whole ones and 11 others, got 16 and 10"),
        (18, lambda relative: [torch.ones(3, 4, 8)], "there are 1 relative terms, too many for the layers"),
    ),
)
def test_lists_that_do_not_fit(at, change, message):
    given = list(arguments("post"))
    given[at] = change(given[at])
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fastbert.encoder_layers_cpu(*given)


@left_to_full(lambda p: p["name"] == "post")  # as "modernbert", with less
@pytest.mark.parametrize("name", ("modernbert", "post"))
def test_compiled(name):
    layers, x, norm = make_stack(name, torch.float32)
    compiled = torch.compile(partial(fused, "encoder_layers"), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(layers, x, norm), fused("encoder_layers", layers, x, norm))
