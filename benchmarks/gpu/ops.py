"""Ops one by one on a GPU: attention in TFLOP/s beside its peers, the others as shares of what memory or GEMMs allow.

Bytes are those that an op must move, each read and written once; operations those of the formula, backward's attention
2.5 times forward's. kernels.py has checked the ops; peers of attention are checked here before they are timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu import tune
from benchmarks.gpu.checks import Where
from benchmarks.gpu.kernels import objections
from benchmarks.gpu.record import Record, failures_of_a_kernel
from benchmarks.gpu.rowwise import feed_forward_plans, planned
from benchmarks.gpu.timer import Call, Timer, ceilings
from fastbert import ops
from fastbert.testing.cases import Lengths

Bench = tuple[Record, Where, Timer]
Rows = dict[str, dict[str, float | str]]


def run_part(record: Record) -> None:
    """The part `ops`."""
    where = Where(record.device, torch.bfloat16, "triton", record.smoke)
    timer = Timer(record.device, where.choose(2, 40))
    record.facts |= record.run("ceilings", lambda: ceilings(timer, record.smoke))
    bench = (record, where, timer)
    for head_dim in where.choose((32,), (64, 128)):
        record.run(f"attention head_dim {head_dim}", partial(attention, bench, head_dim))
    record.run("attention ragged", partial(ragged, bench))
    record.run("attention blocks", partial(tune.few, timer, where))
    for hidden_size in where.choose((64,), (768, 1024)):
        record.run(f"memory-bound, hidden_size {hidden_size}", partial(memory_bound, bench, hidden_size))
    record.run("cross_entropy", partial(cross_entropy, bench))
    for hidden_size in where.choose((32,), (384, 768, 1024)):
        record.run(f"feed_forward, hidden_size {hidden_size}", partial(feed_forward, bench, hidden_size))
    for hidden_size, inner in where.choose(((32, 48),), ((768, 1152), (1024, 2624))):  # ModernBERT's
        record.run(f"gated feed_forward, hidden_size {hidden_size}", partial(feed_forward, bench, hidden_size, inner))


def _leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


def backward_of(function: Callable[..., torch.Tensor], leaves: list[torch.Tensor], dout: torch.Tensor) -> Call:
    """The backward of one forward, again and again."""
    out = function(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


# --------------------------------------------------------------------------------------------------------------------
# attention

Peer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def peers(case: Lengths, where: Where) -> dict[str, Peer]:
    """Everyone over packed q, k, v (total_tokens, num_heads, head_dim); SDPA only where lengths are equal."""
    cu_seqlens, longest = case.cu_seqlens.to(where.device), max(case.lengths)

    def ours(q, k, v):
        return ops.attention(q, k, v, cu_seqlens, longest, cache=cache, backend=where.backend)

    cache: dict = {}  # as in a model: the list of tiles is made once for all layers
    found: dict[str, Peer] = {"fastbert": ours}
    if len(set(case.lengths)) == 1:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def sdpa(backend, q, k, v):
            q, k, v = (t.view(-1, longest, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v)
            return out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])

        kinds = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
        found |= {name: partial(sdpa, kind) for name, kind in (kinds if not where.smoke else {}).items()}
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None and not where.smoke:
        from torch.nn.attention.varlen import varlen_attn

        def varlen(q, k, v):
            return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)

        found["varlen_attn"] = varlen
    return found


def _attention_seconds(bench: Bench, case: Lengths, heads: int, head_dim: int) -> dict[str, dict[str, float | str]]:
    """{contestant: {"fwd": seconds, "bwd": seconds}}, or why it has none; peers must give what ours gives."""
    _, where, timer = bench
    q, k, v = (where.randn(case.total_tokens, heads, head_dim, seed=i) for i in range(3))
    dout = where.randn(case.total_tokens, heads, head_dim, seed=3)
    forward: dict[str, Call] = {}
    backward: dict[str, Call] = {}
    results: dict[str, dict[str, float | str]] = {}
    expected: torch.Tensor | None = None
    for name, peer in peers(case, where).items():
        try:
            out = peer(q, k, v)
            expected = out if expected is None else expected
            error = (out.double() - expected.double()).abs().max().item()
            eps = torch.finfo(where.dtype).eps
            assert error <= 4 * eps * expected.abs().max().item(), f"differs from ours by {error:.3g}"
            backward[name] = backward_of(peer, _leaves(q, k, v), dout)
            backward[name]()
            timer.synchronize()
        except failures_of_a_kernel() as failure:
            if name == "fastbert":
                raise
            backward.pop(name, None)
            results[name] = {"fwd": f"none: {' '.join(str(failure).split())[:120]}"}
            continue
        forward[name] = partial(peer, q, k, v)
    with torch.no_grad():
        fwd = timer.medians(forward)
    bwd = timer.medians(backward)
    return {**{name: {"fwd": fwd[name], "bwd": bwd[name]} for name in forward}, **results}


def _flops(case: Lengths, heads: int, head_dim: int) -> dict[str, float]:
    forward = 4.0 * heads * head_dim * sum(length * length for length in case.lengths)
    return {"fwd": forward, "bwd": 2.5 * forward}


def _rates(case: Lengths, heads: int, head_dim: int, seconds: dict[str, dict[str, float | str]]) -> Rows:
    """TFLOP/s."""
    flops = _flops(case, heads, head_dim)
    return {
        name: {kind: flops[kind] / s / 1e12 if isinstance(s, float) else s for kind, s in found.items()}
        for name, found in seconds.items()
    }


def attention(bench: Bench, head_dim: int) -> dict[str, Any]:
    record, where, timer = bench
    total, lengths, width = where.choose((64, (16, 32), 64), (16384, (512, 1024, 2048), 1024))
    heads = width // head_dim
    numbers: Rows = {}
    for length in lengths:
        case = Lengths("", (length,) * (total // length))
        rates = _rates(case, heads, head_dim, _attention_seconds(bench, case, heads, head_dim))
        for name, row in rates.items():
            numbers.setdefault(name, {}).update({f"{kind} {length}": value for kind, value in row.items()})
        if head_dim == where.choose(32, 64):
            record.figures |= {f"attention_{kind}_{length}": float(r) for kind, r in rates["fastbert"].items()}
    return {"numbers": numbers, "unit": f"TFLOP/s, {total} tokens, {heads} heads of {head_dim}", **timer.note()}


def ragged(bench: Bench) -> dict[str, Any]:
    """Lengths from 64 to 960 in steps of 28, shuffled, beside equal ones of their mean, 512."""
    record, where, timer = bench
    step, mean = where.choose((7, 16), (28, 512))
    lengths = torch.arange(mean - 16 * step, mean + 16 * step + 1, step)
    lengths = lengths[lengths > 0][torch.randperm(int((lengths > 0).sum()), generator=torch.Generator().manual_seed(0))]
    heads, head_dim = where.choose((2, 32), (16, 64))
    cases = {
        "equal": Lengths("", (mean,) * where.choose(2, 33)),
        "ragged": Lengths("", tuple(lengths.tolist()[: where.choose(3, 33)])),
    }
    numbers: Rows = {}
    for name, case in cases.items():
        rates = _rates(case, heads, head_dim, _attention_seconds(bench, case, heads, head_dim))
        for contestant, row in rates.items():
            numbers.setdefault(contestant, {}).update({f"{kind} {name}": value for kind, value in row.items()})
    for kind in ("fwd", "bwd"):
        ours = numbers["fastbert"]
        record.figures[f"attention_ragged_{kind}"] = float(ours[f"{kind} ragged"]) / float(ours[f"{kind} equal"])
    return {"numbers": numbers, "unit": "TFLOP/s", "lengths": sorted(cases["ragged"].lengths), **timer.note()}


# --------------------------------------------------------------------------------------------------------------------
# what memory bounds


def runnable(where: Where, op: str) -> list[str]:
    """The backends that have a kernel of `op` for GPUs and can run it here; the first is what a GPU gets."""
    return [backend.value for backend, objection in objections(where.device)[op].items() if objection is None]


def without_autograd(call: Call) -> Call:
    def run() -> object:
        with torch.no_grad():
            return call()

    return run


def memory_bound(bench: Bench, hidden_size: int) -> dict[str, Any]:
    """Matrices of 400 MB and more: what a cache of 60 MB still holds of them at the end is not seen."""
    record, where, timer = bench
    rows, length = where.choose((32, 16), (262144, 512))
    cu_seqlens = torch.arange(0, rows + 1, length, dtype=torch.int32, device=where.device)
    x, residual, dout = (where.randn(rows, hidden_size, seed=i) for i in range(3))
    weight, bias, x_bias = (where.randn(hidden_size, seed=i) for i in range(3))
    word, position, token_type = (where.randn(n, hidden_size, seed=n) for n in (30522, 512, 2))
    ids, positions = where.integers(30522, rows), where.integers(512, rows)
    types = where.integers(2, rows)
    norm_leaves = _leaves(x, residual, weight, bias, x_bias)
    matrix = x.nbytes
    # A table's row is read from memory once, however many tokens it stands for.
    gathered = 3 * ids.nbytes + sum(len(i.unique()) * weight.nbytes for i in (ids, positions, types))

    def norm(backend, x, residual, weight, bias, x_bias, dropout_p=0.0):
        return ops.add_layer_norm(x, residual, weight, bias, x_bias=x_bias, dropout_p=dropout_p, backend=backend)

    # {(name, backend): (call, the bytes that it moves)}
    calls: dict[tuple[str, str], tuple[Call, float]] = {}
    for backend in runnable(where, "add_layer_norm"):
        plain, dropped = partial(norm, backend), partial(norm, backend, dropout_p=0.1)
        forward = without_autograd(partial(plain, x, residual, weight, bias, x_bias))
        calls["add_layer_norm_fwd", backend] = (forward, 3 * matrix)
        calls["add_layer_norm_fwd_training", backend] = (partial(dropped, *norm_leaves), 4 * matrix)
        calls["add_layer_norm_bwd", backend] = (backward_of(plain, norm_leaves, dout), 3 * matrix)
        calls["add_layer_norm_bwd_dropout", backend] = (backward_of(dropped, norm_leaves, dout), 4 * matrix)
    for backend in runnable(where, "embed_layer_norm"):
        operands = (ids, positions, types, word, position, token_type, weight, bias)
        forward = without_autograd(partial(ops.embed_layer_norm, *operands, backend=backend))
        calls["embed_layer_norm_fwd", backend] = (forward, matrix + gathered)
    for backend in runnable(where, "pooling"):
        calls["pooling_fwd", backend] = (without_autograd(partial(ops.pooling, x, cu_seqlens, backend=backend)), matrix)

    seconds = timer.medians({f"{name}, {backend}": call for (name, backend), (call, _) in calls.items()})
    copy = record.facts["copy_bytes_per_second"]
    numbers: Rows = {}
    figures: dict[str, float] = {}
    for (name, backend), (_, moved) in calls.items():
        taken = seconds[f"{name}, {backend}"]
        numbers[f"{name}, {backend}"] = {"us": 1e6 * taken, "share of copy": moved / taken / copy}
        figures.setdefault(name, moved / taken / copy)
    for name in ("add_layer_norm_fwd", "add_layer_norm_bwd", "embed_layer_norm_fwd", "pooling_fwd"):
        record.figures[name] = min(figures[name], record.figures.get(name, figures[name]))  # over the hidden sizes
    return {"numbers": numbers, "unit": f"{rows} tokens", **timer.note()}


def cross_entropy(bench: Bench) -> dict[str, Any]:
    """15 % of the tokens labelled. The floor: three GEMMs at the ceiling, the logits read twice and written once."""
    record, where, timer = bench
    rows, classes = where.choose((32, 50), (65536, 30522))
    numbers: Rows = {}
    for hidden_size in where.choose((32,), (768, 1024)):
        labels = torch.where(where.integers(100, rows) < 15, where.integers(classes, rows, seed=1), -100)
        count = int((labels != -100).sum())
        x, weight, bias = where.randn(rows, hidden_size), where.randn(classes, hidden_size), where.randn(classes)
        leaves = _leaves(x, weight, bias)

        def step(function, leaves=leaves, labels=labels):
            return torch.autograd.grad(function(*leaves, labels), leaves)

        def in_torch(x, weight, bias, labels):
            kept = (labels != -100).nonzero().flatten()
            logits = F.linear(x.index_select(0, kept), weight, bias)
            return F.cross_entropy(logits.float(), labels.index_select(0, kept))

        seconds = timer.medians({"fastbert": partial(step, ops.cross_entropy), "torch": partial(step, in_torch)})
        products = 6 * count * classes * hidden_size / record.facts["gemm_flops_per_second"]
        logits = 3 * count * classes * where.dtype.itemsize / record.facts["copy_bytes_per_second"]
        for name, found in seconds.items():
            row = {"ms": 1e3 * found, "share of floor": (products + logits) / found}
            numbers[f"{name}, hidden_size {hidden_size}"] = {**row, "labelled": float(count)}
    return {"numbers": numbers, "unit": f"forward and backward, {rows} tokens, {classes} classes", **timer.note()}


# --------------------------------------------------------------------------------------------------------------------
# feed_forward: which way wins where


def feed_forward(bench: Bench, hidden_size: int, gated_size: int = 0) -> dict[str, Any]:
    """Each plan of kernels/feed_forward.py, the CUDA backend where it is built, and torch's GEMM, GELU, GEMM; shares of
    the GEMM ceiling. A plain one is four times as wide as x; a gated one has `gated_size` columns and no bias."""
    record, where, timer = bench
    gated, inner = gated_size > 0, gated_size or 4 * hidden_size
    shapes = ((2 * inner if gated else inner, hidden_size), (hidden_size, inner))
    up, down = (where.randn(*shape, scale=hidden_size**-0.5) for shape in shapes)
    bias = None if gated else where.randn(inner)
    plans = feed_forward_plans(where, gated)
    if "cuda" in runnable(where, "feed_forward"):
        plans["cuda"] = plans["elementwise"]
    numbers: Rows = {}
    winners = []

    def in_torch(x, up, bias, down):
        pre = F.linear(x, up, bias)
        if gated:
            first, second = pre.chunk(2, -1)
            return F.linear(F.gelu(first) * second, down)
        return F.linear(F.gelu(pre), down)

    def with_plan(plan, call):
        def run() -> object:
            with planned(plan):
                return call()

        return run

    def step(function, leaves, dout):
        return torch.autograd.grad(function(*leaves), [leaf for leaf in leaves if leaf is not None], dout)

    for rows in where.choose((16,), (1024, 4096, 16384, 65536)):
        x, dout = where.randn(rows, hidden_size), where.randn(rows, hidden_size, seed=1)
        leaves = [None if t is None else t.detach().requires_grad_() for t in (x, up, bias, down)]
        forward: dict[str, Call] = {"torch": partial(in_torch, x, up, bias, down)}
        both: dict[str, Call] = {"torch": partial(step, in_torch, leaves, dout)}
        for name, plan in plans.items():
            backend = "cuda" if name == "cuda" else where.backend
            ours = partial(ops.feed_forward, gated=gated, backend=backend)
            forward[name] = with_plan(plan, partial(ours, x, up, bias, down))
            both[name] = with_plan(plan, partial(step, ours, leaves, dout))
        with torch.no_grad():
            fwd = timer.medians(forward)
        seconds = {"fwd": fwd, "fwd+bwd": timer.medians(both)}
        floor = 2 * rows * (up.numel() + down.numel()) / record.facts["gemm_flops_per_second"]
        for kind, found in seconds.items():
            scale = 1 if kind == "fwd" else 3
            for name, s in found.items():
                numbers.setdefault(name, {})[f"{kind} {rows}"] = scale * floor / s
            ours_only = {name: s for name, s in found.items() if name in plans}
            winners.append(f"{rows} tokens {kind}: {min(ours_only, key=ours_only.__getitem__)}")
    return {
        "numbers": numbers,
        "unit": f"share of the GEMM ceiling, {hidden_size} -> {inner}{' gated' if gated else ''}",
        "note": "; ".join([*winners, *timer.note().values()]),
    }
