"""attention names what does not fit: heads, shapes, dtypes, scales, windows, positions, offsets and rotary tables."""

from __future__ import annotations

import attention_cases
import pytest
import torch
from attention_cases import RAGGED, backends, in_torch_cpu_and_triton, make, needs_extension, tables

from fastbert import ops
from fastbert.errors import BackendError
from fastbert.ops import Rotary, attention, attention_probs

backend = attention_cases.backend  # the fixture


@needs_extension
@pytest.mark.parametrize("options, reason", [
    ({"k": (4, 3, 16), "v": (4, 3, 16)}, "q has 2 heads, which the 3 of k do not divide"),
    ({"k": (4, 0, 16), "v": (4, 0, 16)}, "q has 2 heads, which the 0 of k do not divide"),
    ({"v": (4, 1, 16)}, "k has 2 heads, v has 1"),
    ({"k": (3, 2, 16)}, r"k has shape \(3, 2, 16\); it must be .* = \(4, num_kv_heads, 16\)"),
    ({"v": (4, 2, 8)}, r"v has shape \(4, 2, 8\); it must be"),
    ({"q": (4, 32), "k": (4, 32), "v": (4, 32)}, r"q has shape \(4, 32\); it must be \(total_tokens, num_heads, h"),
    ({"k_dtype": torch.bfloat16}, "k is torch.bfloat16, q is torch.float32"),
    ({"window_size": (-2, 3)}, r"window_size is \(-2, 3\); it must be \(left, right\)"),
    ({"window_size": (1, 1), "window_positions": torch.arange(4)}, r"is torch.int64 of shape \(4,\); it must be"),
    ({"window_size": (1, 1), "window_positions": torch.arange(3).int()}, r"shape \(3,\); it must be .* = \(4,\)"),
    ({"window_size": (1, 1), "window_positions": torch.tensor([0, 2, 2, 5]).int()}, "stands still at token 2"),
    ({"rotary": Rotary(torch.ones(3, 8), torch.ones(3, 8), by_token=True)}, "cos has 3 rows, .* there are 4 tokens"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("backend", ("torch", "cpu", None))
def test_attention_of_what_does_not_fit(backend, options, reason):
    options = dict(options)
    tensors = {name: torch.randn(options.pop(name, (4, 2, 16))) for name in "qkv"}
    tensors["k"] = tensors["k"].to(options.pop("k_dtype", torch.float32))
    with pytest.raises((ValueError, RuntimeError) if "still" in reason else ValueError, match=reason):
        ops.attention(**tensors, cu_seqlens=torch.tensor([0, 4]), max_seqlen=4, backend=backend, **options)


@pytest.mark.parametrize("options, reason", [
    ({"window_size": (-1, -3)}, r"window_size is \(-1, -3\)"),
    ({"window_size": (1, 1), "window_positions": torch.tensor([3, 1, 4, 5]).int()}, "stands still at token 1"),
    ({"window_positions": torch.arange(4.0)}, "window_positions is torch.float32"),
    ({"rotary": Rotary(torch.ones(4, 7), torch.ones(4, 7))}, "cos has shape"),
], ids=str)  # fmt: skip
def test_attention_probs_of_what_does_not_fit(options, reason):
    q, k = torch.randn(4, 2, 16), torch.randn(4, 1, 16)
    with pytest.raises(ValueError, match=reason):
        ops.attention_probs(q, k, torch.tensor([0, 4]), 4, **options)
    with pytest.raises(ValueError, match="which the 3 of k do not divide"):
        ops.attention_probs(q, torch.randn(4, 3, 16), torch.tensor([0, 4]), 4)


@pytest.mark.parametrize(
    "probs,heads,reason",
    [
        ((1, 4, 4, 3), 2, r"probs has shape \(1, 4, 4, 3\), expected \(1, heads, max_seqlen, max_seqlen\)"),
        ((2, 4, 4, 4), 2, r"expected \(1, heads"),
        ((4, 4, 4), 2, r"expected \(1, heads"),
        ((1, 4, 4, 4), 3, r"v has shape \(4, 3, 16\), for 4 heads of probs"),
        ((1, 4, 3, 3), 4, "max_seqlen"),
    ],
)
def test_attention_from_probs_of_what_does_not_fit(probs, heads, reason):
    with pytest.raises(ValueError, match=reason):
        ops.attention_from_probs(torch.zeros(probs), torch.randn(4, heads, 16), torch.tensor([0, 4]))


@pytest.mark.parametrize("softmax_scale", (float("nan"), float("inf")), ids=str)
def test_a_scale_that_is_not_finite_is_refused(softmax_scale):
    q, k, v = make(RAGGED)
    with pytest.raises(ValueError, match=f"softmax_scale is {softmax_scale}, it must be finite"):
        attention(q, k, v, RAGGED.cu_seqlens, 41, softmax_scale=softmax_scale)
    with pytest.raises(ValueError, match=f"softmax_scale is {softmax_scale}, it must be finite"):
        attention_probs(q, k, RAGGED.cu_seqlens, 41, softmax_scale=softmax_scale)


@needs_extension
@pytest.mark.parametrize(
    "offsets, reason",
    [([0, 3, 2], "below"), ([0, 5], "above total_tokens, which is 4"), ([1, 4], "expected 0")],
    ids=str,
)
def test_offsets_that_do_not_fit(offsets, reason):
    q = torch.zeros(4, 2, 16)
    with pytest.raises(RuntimeError, match=rf"cu_seqlens\[.*\] is .*{reason}"):
        attention(q, q, q, torch.tensor(offsets, dtype=torch.int32), 4, backend="cpu")


@backends("cpu", "triton")
def test_a_head_that_is_too_wide(backend):
    q = torch.zeros(4, 2, 257)
    with pytest.raises(BackendError, match=r"head_dim is 257 .has 2 to 256"):
        attention(q, q, q, torch.tensor([0, 4], dtype=torch.int32), 4, backend=backend)


@in_torch_cpu_and_triton
def test_rotary_tables_that_do_not_fit(backend):
    q, cu_seqlens = torch.zeros(4, 2, 16), torch.tensor([0, 4], dtype=torch.int32)
    cos, sin, *_ = tables(4, 16)
    cases = (
        ((cos[:, :5], sin), r"cos has shape \(4, 5\), expected \(rows, head_dim // 2 = 8\)"),
        ((cos, sin[:, None]), r"sin has shape \(4, 1, 8\), expected"),
        ((cos, sin.bfloat16()), "sin is torch.bfloat16, expected torch.float32"),
        ((cos.to("meta"), sin), "cos is on meta, q on cpu"),
        ((cos[:3], sin), "cos has 3 positions, max_seqlen is 4"),
        ((cos, torch.cat([sin, sin])), r"cos has shape \(4, 8\), sin \(8, 8\)"),
        ((cos, sin.clone().requires_grad_()), "sin requires a gradient"),
    )
    with torch.profiler.profile() as profile:
        for rotary, reason in cases:
            with pytest.raises(ValueError, match=reason):
                attention(q, q, q, cu_seqlens, 4, rotary=Rotary(*rotary), backend=backend)
        odd = torch.zeros(4, 2, 15)
        with pytest.raises(ValueError, match="head_dim is 15"):
            attention(odd, odd, odd, cu_seqlens, 4, rotary=Rotary(cos, sin), backend=backend)
    assert not [event for event in profile.events() if event.name.startswith("fastbert::")]
    with pytest.raises(ValueError, match="cos has 3 positions, max_seqlen is 4"):
        attention_probs(q, q, cu_seqlens, 4, rotary=tables(3, 16))
