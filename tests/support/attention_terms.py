"""How large the terms are that attention adds up, and so what rounding may leave of each result, to first order.

A rule that compares with the largest error of another implementation holds by luck where two cases meet: what is 0 by
mathematics (the gradient of a key's bias, since softmax does not see what all keys of a query share), and where few
elements have nearly all of the error (large scores, of which two keys have nearly the same).
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

FORMULA = reference.attention  # which `key_bias_terms` may replace
OPTIONS = ("softmax_scale", "keep", "dropout_p", "window_size", "window_positions", "relative")


def attention_terms(
    q, k, v, dout, cu_seqlens, softmax_scale=None, keep=None, dropout_p=0.0, scores_round=True, **window
) -> dict[str, torch.Tensor]:
    """The sums of the absolute values of all terms of out, dq, dk and dv, by these names and in their shapes.

    Shapes and options as in reference.attention; dout as q; in float64. scores_round: the rounding of scores counts,
    as eps times the sum of its terms, of which its probability p changes by p (1 - p).
    """
    softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group, longest = q.shape[1] // k.shape[1], int(cu_seqlens.diff().max())
    position = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])
    position = torch.nn.functional.pad(position, (0, len(q) - len(position)))
    one_hot = torch.nn.functional.one_hot(position, max(longest, 1)).to(q)[:, None].expand(-1, k.shape[1], -1)
    every = FORMULA(q, k, one_hot, cu_seqlens, softmax_scale, **window)  # (total_tokens, num_heads, keys)
    sums = {"out": torch.zeros_like(q), "dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    for start, stop in pairwise(cu_seqlens.tolist()):
        here = slice(start, stop)
        queries, grads = q[here].abs(), dout[here].abs()
        keys, values = (t[here].abs().repeat_interleave(group, 1) for t in (k, v))
        probs = every[here, :, : stop - start]
        if scores_round:
            scores = torch.einsum("qhd,khd->qhk", queries, keys) * abs(softmax_scale)
            others = (probs * scores).sum(-1, keepdim=True) - probs * scores
            probs = probs * (1 + scores * (1 - probs) + others)
        kept = 1.0 if keep is None else keep[here, :, : stop - start] / (1.0 - dropout_p)
        dprobs = torch.einsum("qhd,khd->qhk", grads, values) * kept
        dscores = probs * (dprobs + (probs * dprobs).sum(-1, keepdim=True)) * abs(softmax_scale)
        sums["out"][here] = torch.einsum("qhk,khd->qhd", probs * kept, values)
        sums["dq"][here] = torch.einsum("qhk,khd->qhd", dscores, keys)
        for name, left, right in (("dk", dscores, queries), ("dv", probs * kept, grads)):
            sums[name][here] = torch.einsum("qhk,qhd->khd", left, right).unflatten(1, (-1, group)).sum(2)
    return sums


def assert_close_in_units(actual, oracle, baseline, terms, factor: float, name: str = "") -> None:
    """assert_close_to_reference in units of the terms: an error counts by what rounding may leave of its element."""
    assert actual.shape == oracle.shape == baseline.shape == terms.shape, name
    assert actual.dtype == baseline.dtype and oracle.dtype == torch.float64 and torch.isfinite(actual).all(), name
    unit = torch.where(terms > 0, terms, torch.ones_like(terms))
    found, allowed = ((t.double() - oracle).abs() / unit for t in (actual, baseline))
    eps = torch.finfo(actual.dtype).eps
    for kind, reduce in (("largest", torch.max), ("mean", torch.mean)):
        bound = factor * (reduce(allowed) + eps * reduce(oracle.abs() / unit))
        assert reduce(found) <= bound, f"{name}: the {kind} error is {reduce(found):.3e} of its terms, over {bound:.3e}"


def assert_zero_but_for_rounding(actual: torch.Tensor, terms: torch.Tensor, dtype: torch.dtype, name: str = "") -> None:
    """Assert that the largest and the mean of |actual| are at most eps(dtype) times those of `terms`."""
    assert actual.shape == terms.shape and torch.isfinite(actual).all(), name
    for kind, reduce in (("largest", torch.max), ("mean", torch.mean)):
        found, bound = reduce(actual.double().abs()).item(), torch.finfo(dtype).eps * reduce(terms).item()
        assert found <= bound, f"{name}: the {kind} is {found:.3e}, and rounding may leave {bound:.3e}"


@contextmanager
def key_bias_terms(where: Any) -> Iterator[dict[int, torch.Tensor]]:
    """Of the gradients of keys' biases, for each call of `where.attention` within, reference's or ops', by its number:
    (num_kv_heads * head_dim,). Backward fills them in. Those of a call with rotary embedding, or with terms of keys and
    distances (`relative.query`), mean nothing: there such a gradient is not 0.
    """
    terms: dict[int, torch.Tensor] = {}
    attention, numbers = where.attention, count()
    takes = signature(attention)

    def recorded(q, k, v, cu_seqlens, *args, **options):
        out, number = attention(q, k, v, cu_seqlens, *args, **options), next(numbers)
        given = takes.bind(q, k, v, cu_seqlens, *args, **options).arguments
        given = {name: given[name] for name in OPTIONS if name in given}
        operands = [t.detach() for t in (q, k, v)]

        def note(dout: torch.Tensor) -> None:
            of_tokens = attention_terms(*operands, dout, cu_seqlens, scores_round=False, **given)["dk"]
            terms[number] = of_tokens.sum(0).flatten()

        out.register_hook(note)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, "attention", recorded)
        yield terms
