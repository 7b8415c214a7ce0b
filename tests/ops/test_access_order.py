"""The threads of a GPU's program are not in step: what one reads, another must not store without a barrier between."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from attention_cases import SLACK, make, needs_triton
from full import halved
from interpreted_like_a_gpu import unordered_accesses

from fastbert import ops

pytestmark = [
    needs_triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="only the interpreter sees every access"),
]


def norm(x):
    weight, bias = (torch.ones(x.shape[1], requires_grad=True) for _ in range(2))
    return ops.add_layer_norm(x, x, weight, bias, x_bias=weight, eps=1e-5, dropout_p=0.5, backend="triton")


def feed_forward(x, gated=False):
    up, down = torch.randn(160 if gated else 80, x.shape[1]), torch.randn(x.shape[1], 80)
    leaves = [t.requires_grad_() for t in (up, torch.randn(up.shape[0]), down)]
    return ops.feed_forward(x, *leaves, gated=gated, backend="triton")


def cross_entropy(x, classes):
    labels = torch.randint(0, classes, (x.shape[0],))
    return ops.cross_entropy(x, torch.randn(classes, x.shape[1]), torch.randn(classes), labels, backend="triton")


def attention(x):
    q, k, v = make(SLACK, 2, 16)
    rotary = ops.Rotary(torch.randn(16, 8), torch.randn(16, 8))
    options = {"dropout_p": 0.5, "window_size": (2, 3), "rotary": rotary, "backend": "triton"}
    return ops.attention(q + x.sum() * 0, k, v.requires_grad_(), SLACK.cu_seqlens, 6, **options)


def embeddings(x):
    ids = torch.randint(0, 3, (70,))
    tables = (x, torch.randn(70, x.shape[1], requires_grad=True), torch.randn(2, x.shape[1], requires_grad=True))
    weight = torch.ones(x.shape[1])
    return ops.embed_layer_norm(ids, torch.arange(70), ids % 2, *tables, weight, weight, backend="triton")


def pooling(x, mode):
    cu_seqlens = torch.tensor([0, 1, 1, 17], dtype=torch.int32)
    return ops.pooling(x, cu_seqlens, mode=mode, backend="triton")


CALLS = {
    "add_layer_norm": norm,
    "feed_forward": feed_forward,
    "feed_forward, gated": partial(feed_forward, gated=True),
    "cross_entropy, one warp": partial(cross_entropy, classes=7),
    "cross_entropy, many blocks": partial(cross_entropy, classes=9001),
    "attention": attention,
    "embeddings": embeddings,
    "dropout": lambda x: ops.dropout(x, 0.5, backend="triton"),
    "pooling, mean": partial(pooling, mode="mean"),
    "pooling, max": partial(pooling, mode="max"),
}


@pytest.mark.full
@halved
@pytest.mark.parametrize("name", CALLS)
def test_no_thread_stores_what_another_may_still_read(name):
    x = torch.randn(17, 40, requires_grad=True)
    with unordered_accesses() as found:
        CALLS[name](x).sum().backward()
        with torch.no_grad():
            CALLS[name](x)
    assert found == []
    assert x.grad is not None


def test_the_order_is_seen():
    """A store of what a load of another shape has read, a load of what was stored elsewhere; not behind a barrier."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(ptr, HAS_BARRIER: tl.constexpr):
        one = tl.load(ptr + 3)
        if HAS_BARRIER:
            tl.debug_barrier()
        tl.store(ptr + tl.arange(0, 4), tl.arange(0, 4).to(tl.float32) + one)
        if HAS_BARRIER:
            tl.debug_barrier()
        tl.store(ptr + 8 + tl.arange(0, 4), tl.load(ptr + 3 - tl.arange(0, 4)))

    memory = torch.zeros(16)
    for has_barrier, expected in ((True, 0), (False, 2)):
        with unordered_accesses() as found:
            kernel[(2,)](memory, HAS_BARRIER=has_barrier)
        assert len(found) == 2 * expected, found
