"""attention names what does not fit: heads, shapes, dtypes, windows, positions and rotary tables."""

from __future__ import annotations

import pytest
import torch
from test_attention import needs_extension

from fastbert import ops
from fastbert.ops import Rotary


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
