"""Stacks of layers of every form as one op, in inference."""

from __future__ import annotations

import pytest
import torch
from layer_forms import CASES, HIDDEN, TOKENS, fused, literal, make, make_final_norm

from fastbert.ops._common import extension_error
from fastbert.testing.cases import DTYPES
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

pytestmark = pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_against_oracle(name, dtype):
    case = CASES[name]
    torch.manual_seed(0)
    layers, x = [make(case, seed) for seed in range(2)], torch.randn(TOKENS, HIDDEN)
    layers, x = [layer.map(lambda t: t.to(dtype)) for layer in layers], x.to(dtype)
    final = make_final_norm(case.form.norm) if case.form.norm_first else None
    finals = [None] if final is None else [None, [None if t is None else t.to(dtype) for t in final]]
    with torch.inference_mode():
        for final in finals:
            before = x.clone()
            ours = fused("encoder_layers", layers, x, final)
            assert torch.equal(x, before)
            wide = None if final is None else [None if t is None else t.double() for t in final]
            oracle = literal([layer.map(torch.Tensor.double) for layer in layers], x.double(), wide)
            assert_close_to_reference(ours, oracle, literal(layers, x, final), GRADIENT_FACTOR, name)
