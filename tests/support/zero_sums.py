"""The gradient of a key's bias: 0 by mathematics, since softmax does not see what all keys of a query share.

What is left is the rounding of what was added up. It is bounded by eps times the scale of that, which is the sum of the
absolute values of all terms: not by a literal, and not by what another implementation happens to leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from itertools import count, pairwise
from typing import Any

import pytest
import torch

from fastbert.testing import reference

FORMULA = reference.attention  # which `key_bias_scales` may replace
OPTIONS = ("softmax_scale", "keep", "dropout_p", "window_size", "window_positions")


def assert_zero_but_for_rounding(actual: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, name: str = "") -> None:
    """Assert that the largest and the mean of |actual| are at most eps(dtype) times those of `scale`."""
    assert actual.shape == scale.shape and torch.isfinite(actual).all(), name
    for kind, reduce in (("largest", torch.max), ("mean", torch.mean)):
        found, bound = reduce(actual.double().abs()).item(), torch.finfo(dtype).eps * reduce(scale).item()
        assert found <= bound, f"{name}: the {kind} is {found:.3e}, and rounding may leave {bound:.3e}"


def key_bias_scale(q, k, v, dout, cu_seqlens, softmax_scale=None, keep=None, dropout_p=0.0, **window) -> torch.Tensor:
    """The sum of |term| of the gradient of a key's bias: probs (|dprobs| + |delta|) softmax_scale |q|.

    Shapes and options as in reference.attention; dout as q; all in float64.
    """
    softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    num_kv_heads, longest = k.shape[1], int(cu_seqlens.diff().max())
    position = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])
    position = torch.nn.functional.pad(position, (0, len(q) - len(position)))
    one_hot = torch.nn.functional.one_hot(position, longest).to(q)[:, None].expand(-1, num_kv_heads, -1)
    probs = FORMULA(q, k, one_hot, cu_seqlens, softmax_scale, **window)  # (total_tokens, num_heads, longest)
    scale = q.new_zeros(num_kv_heads, q.shape[-1])
    for start, stop in pairwise(cu_seqlens.tolist()):
        values = v[start:stop].repeat_interleave(q.shape[1] // num_kv_heads, 1)
        dprobs = torch.einsum("qhd,khd->qhk", dout[start:stop], values)
        if keep is not None:
            dprobs = torch.where(keep[start:stop, :, : stop - start], dprobs / (1.0 - dropout_p), 0.0)
        row = probs[start:stop, :, : stop - start]
        delta = (row * dprobs).sum(-1, keepdim=True)
        terms = (row * (dprobs.abs() + delta.abs())).sum(-1, keepdim=True) * q[start:stop].abs() * abs(softmax_scale)
        scale += terms.sum(0).view(num_kv_heads, -1, q.shape[-1]).sum(1)
    return scale.flatten()


@contextmanager
def key_bias_scales(where: Any) -> Iterator[dict[int, torch.Tensor]]:
    """Those of the calls of `where.attention` within, reference's or ops', by their number; backward fills them in."""
    scales: dict[int, torch.Tensor] = {}
    attention, numbers = where.attention, count()
    takes = signature(attention)

    def recorded(q, k, v, cu_seqlens, *args, **options):
        out, number = attention(q, k, v, cu_seqlens, *args, **options), next(numbers)
        given = takes.bind(q, k, v, cu_seqlens, *args, **options).arguments
        given = {name: given[name] for name in OPTIONS if name in given}
        operands = [t.detach() for t in (q, k, v)]

        def note(dout: torch.Tensor) -> None:
            scales[number] = key_bias_scale(*operands, dout, cu_seqlens, **given)

        out.register_hook(note)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, "attention", recorded)
        yield scales
