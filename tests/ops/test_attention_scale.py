"""attention's softmax_scale where it is none, has no size, or a sign: with windows, dropout, slack and short blocks."""

from __future__ import annotations

import pytest
import test_attention
import torch
from full import left_to_full
from test_attention import (
    RAGGED,
    SLACK,
    check,
    differentiate,
    each_dtype,
    each_kernel,
    is_interpreted_in_16_bits,
    make,
)
from test_attention_dropout import dropped_probabilities
from test_attention_tiles import needs_triton

from fastbert.ops.attention import attention
from fastbert.testing.cases import Lengths
from fastbert.testing.numerics import OUTPUT_FACTOR, assert_close_to_reference

backend = test_attention.backend  # the fixture
SCALES = (0.0, -0.0, -1e-300, 1e-45, -0.25)  # 1e-45 is the smallest number of fp32


@left_to_full(lambda p: is_interpreted_in_16_bits(p) and p["softmax_scale"] not in (0.0, -0.25))
@pytest.mark.parametrize("softmax_scale", SCALES)
@each_dtype
@each_kernel
def test_any_scale(backend, dtype, softmax_scale):
    for case in (RAGGED, SLACK):
        check(backend, make(case, num_heads=1, dtype=dtype), case, softmax_scale=softmax_scale)


@pytest.mark.parametrize("softmax_scale", (0.0, -0.25))
@each_dtype
@each_kernel
def test_any_scale_with_dropout(backend, dtype, softmax_scale):
    keep = dropped_probabilities(backend, RAGGED, 1, 0.25, 7, dtype)[0] != 0
    options = {"keep": keep, "dropout_p": 0.25, "seed": 7, "softmax_scale": softmax_scale}
    check(backend, make(RAGGED, 1, 41, dtype), RAGGED, **options)


@needs_triton
@left_to_full(lambda p: p["dtype"] is torch.bfloat16 and p["window_size"] != (1, 3))
@pytest.mark.parametrize("window_size", ((0, 0), (1, 3), (17, -1)), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_any_scale_in_windows(dtype, window_size):
    """Blocks of which some queries see no key: there 0 would be multiplied by -inf."""
    for case, softmax_scale in ((RAGGED, 0.0), (SLACK, -1e-300), (Lengths("", (70,)), -0.25)):
        qkv = make(case, num_heads=1, dtype=dtype)
        check("triton", qkv, case, window_size=window_size, softmax_scale=softmax_scale)


@left_to_full(is_interpreted_in_16_bits)
@each_dtype
@each_kernel
def test_a_scale_of_zero_is_the_mean_and_q_and_k_take_no_gradient(backend, dtype):
    qkv = 30 * make(RAGGED, num_heads=1, dtype=dtype)

    def f(q, k, v):
        return attention(q, k, v, RAGGED.cu_seqlens, 41, softmax_scale=0.0, backend=backend)

    out, gradient = differentiate(f, qkv, qkv[0])
    means = [v.mean(0, keepdim=True).expand_as(v) for v in qkv[2].double().split(RAGGED.lengths)]
    literal = [v.mean(0, keepdim=True).expand_as(v) for v in qkv[2].split(RAGGED.lengths)]
    assert_close_to_reference(out, torch.cat(means), torch.cat(literal), OUTPUT_FACTOR, "out")
    assert not gradient[:2].any() and gradient[2].any()


@pytest.mark.parametrize("window_size", ((3, 2**31 - 1), (2**31 - 1, 3), (2**40, 2**40)), ids=str)
@each_kernel
def test_windows_wider_than_any_sequence(backend, window_size):
    """As the literal formula has them: nothing wraps around where a token's number is added."""
    check(backend, make(SLACK, num_heads=1), SLACK, window_size=window_size)
