"""Ops by themselves on a dry driver (dry_launches.py): kinds of calls that no model there makes."""

from __future__ import annotations

import torch

from benchmarks.gpu.checks import planned
from fastbert import ops
from fastbert.backend import use_backend
from fastbert.kernels import blocks


def attend_in_every_kind() -> None:
    """What no model has yet: heads of k that q's share, windows by position, rotary embedding of both layouts."""
    offsets = torch.tensor([0, 64, 70], dtype=torch.int32)
    by_position, by_token = (ops.Rotary(*torch.ones(2, rows, 32).unbind()) for rows in (64, 70))
    window = {"window_size": (3, 5), "window_positions": torch.arange(70, dtype=torch.int32)}
    for options in ({"rotary": by_position}, {"rotary": by_token._replace(interleaved=True, by_token=True), **window}):
        for compiled in (ops.attention, torch.compile(ops.attention, fullgraph=True, backend="aot_eager")):
            for num_kv_heads in (4, 1):
                heads = (4, num_kv_heads, num_kv_heads)
                qkv = torch.ones(70, sum(heads), 64, dtype=torch.bfloat16, requires_grad=True)
                out = compiled(*qkv.split(heads, 1), offsets, 64, backend="triton", **options)
                out.sum().backward()


def attend_with_relative_terms() -> None:
    """Each term, holes, windows and dropout; in a graph, too, of any length, with tables that nobody trains."""
    rows = (torch.arange(2 * 90 - 1) // 8).int()
    compiled = torch.compile(ops.attention, fullgraph=True, dynamic=True, backend="aot_eager")
    shapes = {"key": (23, 2, 64), "query": (23, 2, 64), "bias": (23, 2)}
    for terms, has_holes, options in (
        (("key", "query"), False, {"dropout_p": 0.1}),
        (("bias",), False, {}),
        (("key", "query", "bias"), True, {"dropout_p": 0.1, "window_size": (3, 5)}),
    ):
        for lengths in ((64, 6), (80, 1, 3)):
            total = sum(lengths)
            offsets = torch.tensor((0, *lengths)).cumsum(0).int()
            places = torch.arange(total, dtype=torch.int32) if has_holes else None
            for function in (ops.attention, compiled):
                is_trained = function is ops.attention
                tables = {
                    name: torch.ones(shapes[name], dtype=torch.bfloat16, requires_grad=is_trained) for name in terms
                }
                qkv = torch.ones(total, 6, 64, dtype=torch.bfloat16, requires_grad=True)
                relative = ops.Relative(rows, **tables, positions=places)
                called = {"relative": relative, "backend": "triton", **options}
                function(*qkv.split(2, 1), offsets, max(lengths), **called).sum().backward()


def norm_without_mean_and_positions() -> None:
    """RMSNorm, and embeddings without a position table."""
    weight = torch.ones(128, dtype=torch.bfloat16, requires_grad=True)
    word = torch.ones(100, 128, dtype=torch.bfloat16, requires_grad=True)
    with use_backend("triton"):
        x = ops.embed_layer_norm(torch.arange(70), None, None, word, None, None, weight, None)
        ops.add_rms_norm(x, x, weight, x_bias=weight, dropout_p=0.1).sum().backward()
        with torch.no_grad():
            ops.rms_norm(ops.embed_layer_norm(torch.arange(70), None, None, word, None, None, weight, None), weight)


def pool() -> None:
    """One long text, which several programs share, and short ones."""
    for offsets in ((0, 2000), (0, 60, 60, 100)):
        for mode in ("mean", "max"):
            x = torch.ones(offsets[-1], 128, dtype=torch.bfloat16, requires_grad=True)
            ops.pooling(x, torch.tensor(offsets, dtype=torch.int32), mode=mode, backend="triton").sum().backward()


def score_late_interaction() -> None:
    """All pairs and listed ones, trained; documents in int8, whose queries are rounded, too."""
    offsets = [torch.tensor(cuts, dtype=torch.int32) for cuts in ((0, 32, 64), (0, 70, 100, 230))]
    queries, documents = (torch.ones(rows, 128, dtype=torch.bfloat16, requires_grad=True) for rows in (64, 230))
    for pairs in (None, torch.tensor([[0, 1], [2, 0]])):
        ops.maxsim(queries, offsets[0], documents, offsets[1], pairs=pairs, backend="triton").sum().backward()
    whole, scales = torch.ones(230, 128, dtype=torch.int8), torch.ones(230)
    ops.maxsim(queries.detach(), offsets[0], whole, offsets[1], scales=scales, backend="triton")


def optimize() -> None:
    """Models of one group and of several, with and without clipping."""
    for groups in ((0, 0), (0, 1), tuple(range(20))):
        weights = [torch.ones(100 * (i + 1)) for i in range(len(groups))]
        state = ops.FlatState(weights, groups)
        numbers = torch.ones(2 + 2 * state.num_groups)
        for max_norm in (0.0, 1.0):
            options = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "max_norm": max_norm}
            ops.adamw_flat(state, numbers, backend="triton", **options)


def feed_forward_with_epilogues(device: torch.device) -> None:
    """Candidates, which no model gets before they have been timed: 16 bits, plain and gated."""
    for gated in (False, True):
        up, down = torch.ones((2 if gated else 1) * 512, 128), torch.ones(128, 512)
        for dtype in (torch.bfloat16, torch.float16):
            x, *weights = (t.to(dtype).requires_grad_() for t in (torch.ones(1200, 128), up, up[:, 0], down))
            with planned(blocks.epilogue_of(device, gated)):
                ops.feed_forward(x, *weights, gated=gated, backend="triton").sum().backward()


def run_ops() -> None:
    attend_in_every_kind()
    attend_with_relative_terms()
    norm_without_mean_and_positions()
    pool()
    score_late_interaction()
    optimize()
    feed_forward_with_epilogues(torch.device("cpu"))
