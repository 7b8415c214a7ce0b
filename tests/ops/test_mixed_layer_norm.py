"""add_layer_norm of 16-bit matrices with vectors in fp32, and what autocast makes of it."""

from __future__ import annotations

import re

import pytest
import torch
from seeds import manual_seed

import fastbert
from fastbert import ops
from fastbert.backend import use_backend
from fastbert.errors import BackendError
from fastbert.native.availability import triton_error
from fastbert.testing import reference
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
MATRICES, VECTORS = ("x", "residual"), ("weight", "bias", "x_bias")
ROWS, WIDTH = 21, 48


def make() -> dict[str, torch.Tensor]:
    manual_seed(0)
    tensors = {name: torch.randn(ROWS, WIDTH) for name in MATRICES}
    return tensors | {name: torch.randn(WIDTH) for name in VECTORS}


def rounded(tensors, dtype) -> dict[str, torch.Tensor]:
    return {name: t.to(dtype) if name in MATRICES else t for name, t in tensors.items()}


def differentiate(function, tensors, kind: torch.dtype | None, dout) -> dict[str, torch.Tensor]:
    leaves = {name: (t if kind is None else t.to(kind)).detach().requires_grad_() for name, t in tensors.items()}
    out = function(**leaves)
    return {"out": out, **dict(zip(leaves, torch.autograd.grad(out, leaves.values(), dout.to(out)), strict=True))}


def in_parts(x, residual, weight, bias, x_bias):
    """The literal formula as a model in 16 bits would have it: the sum in x's dtype, the LayerNorm in fp32."""
    summed = x + x_bias.to(x.dtype) + residual
    return reference.layer_norm(summed.float(), weight, bias, 1e-12).to(x.dtype)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_against_oracle(dtype):
    tensors = rounded(make(), dtype)
    dout = torch.randn(ROWS, WIDTH).to(dtype)
    ours = differentiate(lambda **t: ops.add_layer_norm(**t, backend="triton"), tensors, None, dout)
    oracle = differentiate(lambda **t: reference.add_layer_norm(**t)[0], tensors, torch.float64, dout)
    baseline = differentiate(in_parts, tensors, None, dout)
    for name, found in ours.items():
        assert found.dtype is (torch.float32 if name in VECTORS else dtype)
        factor = OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR
        assert_close_to_reference(found, oracle[name], baseline[name], factor, name)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("backend", ("torch", "triton"))
def test_autocast(dtype, backend):
    """bf16 matrices for Triton; fp32 for fp16, whose range a sum may leave, and in torch."""
    tensors = make()
    with torch.autocast("cpu", dtype), use_backend(backend):
        out, summed = ops.add_layer_norm(**tensors, prenorm=True)
    is_mixed = backend == "triton" and dtype is torch.bfloat16
    given = rounded(tensors, dtype) if is_mixed else tensors
    expected = ops.add_layer_norm(**given, prenorm=True, backend=backend)
    assert out.dtype is summed.dtype is (torch.bfloat16 if is_mixed else torch.float32)
    assert torch.equal(out, expected[0]) and torch.equal(summed, expected[1])


def test_a_model_under_autocast_gives_fp32():
    manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = fastbert.BertModel(fastbert.EncoderConfig(vocab_size=50, **shape)).eval()
    with torch.no_grad(), use_backend("triton"), torch.autocast("cpu", torch.bfloat16):
        output = model(torch.arange(5, 17)[None], output_hidden_states=True)
    assert {t.dtype for t in (output.last_hidden_state, *output.hidden_states)} == {torch.float32}


def test_other_mixtures_are_refused():
    tensors = make()
    half = rounded(tensors, torch.bfloat16)
    cases = {
        "weight is torch.float64": {**tensors, "weight": tensors["weight"].double()},
        "weight is torch.bfloat16": {**tensors, "weight": tensors["weight"].bfloat16()},
        "bias is torch.bfloat16, not torch.float32": {**half, "bias": tensors["bias"].bfloat16()},
        "residual is torch.float32, not torch.bfloat16": {**half, "residual": tensors["residual"]},
    }
    for message, given in cases.items():
        with pytest.raises(BackendError, match=re.escape(message)):
            ops.add_layer_norm(**given, backend="triton")
    for backend in ("cpu", "cuda"):
        with pytest.raises(BackendError, match=r"weight is torch\.float32, x is torch\.bfloat16|tensors are on cpu"):
            ops.add_layer_norm(**half, backend=backend)
