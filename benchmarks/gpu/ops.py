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
from benchmarks.gpu.checks import Call, Timer, Where, ceilings, feed_forward_sizes
from benchmarks.gpu.products import Bench, Rows, feed_forward, leaves_of, products, runnable
from benchmarks.gpu.record import Record, failures_of_a_kernel
from fastbert import ops
from fastbert.testing.cases import Lengths


def run_part(record: Record) -> None:
    """The part `ops`."""
    where = Where(record.device, torch.bfloat16, "triton", record.smoke)
    timer = Timer(record.device, where.choose(1, 40))
    record.facts |= record.run("ceilings", lambda: ceilings(timer, record.smoke))
    bench = (record, where, timer)
    for head_dim in where.choose((32,), (64, 128)):
        record.run(f"attention head_dim {head_dim}", partial(attention, bench, head_dim))
    record.run("attention ragged", partial(ragged, bench))
    record.run("attention with dropout", partial(attention_with_dropout, bench))
    record.run("attention, kinds", partial(attention_kinds, bench))
    record.run("candidates", partial(tune.try_for_ops, record, where))
    record.run("attention blocks", partial(tune.few, record, timer, where))
    for hidden_size in where.choose((64,), (768, 1024)):
        record.run(f"memory-bound, hidden_size {hidden_size}", partial(memory_bound, bench, hidden_size))
    record.run("cross_entropy", partial(cross_entropy, bench))
    record.run("products", partial(products, bench))
    for hidden_size, gated_size in feed_forward_sizes(where):
        name = f"{'gated ' if gated_size else ''}feed_forward, hidden_size {hidden_size}"
        record.run(name, partial(feed_forward, bench, hidden_size, gated_size))


def backward_of(function: Callable[..., torch.Tensor], leaves: list[torch.Tensor], dout: torch.Tensor) -> Call:
    """The backward of one forward, again and again."""
    out = function(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


# --------------------------------------------------------------------------------------------------------------------
# attention

Peer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def peers(case: Lengths, where: Where, dropout_p: float = 0.0) -> dict[str, Peer]:
    """Everyone over packed q, k, v (total_tokens, num_heads, head_dim); SDPA only where lengths are equal, and
    varlen_attn, which has no dropout, only without it."""
    cu_seqlens, longest = case.cu_seqlens.to(where.device), max(case.lengths)

    def ours(q, k, v):
        return ops.attention(q, k, v, cu_seqlens, longest, dropout_p=dropout_p, cache=cache, backend=where.backend)

    cache: dict = {}  # as in a model: the list of tiles is made once for all layers
    found: dict[str, Peer] = {"fastbert": ours}
    if len(set(case.lengths)) == 1:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def sdpa(backend, q, k, v):
            q, k, v = (t.view(-1, longest, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
            return out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])

        kinds = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
        found |= {name: partial(sdpa, kind) for name, kind in (kinds if not where.smoke else {}).items()}
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None and not where.smoke and not dropout_p:
        from torch.nn.attention.varlen import varlen_attn

        def varlen(q, k, v):
            return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)

        found["varlen_attn"] = varlen
    return found


def _attention_seconds(
    bench: Bench, case: Lengths, heads: int, head_dim: int, dropout_p: float = 0.0
) -> dict[str, dict[str, float | str]]:
    """{contestant: {"fwd": seconds, "bwd": seconds}}, or why it has none; peers must give what ours gives.

    With dropout, whose masks differ, everyone must drop and keep the mean; forward is then that of training.
    """
    _, where, timer = bench
    q, k, v = (where.randn(case.total_tokens, heads, head_dim, seed=i) for i in range(3))
    dout = where.randn(case.total_tokens, heads, head_dim, seed=3)
    forward: dict[str, Call] = {}
    backward: dict[str, Call] = {}
    results: dict[str, dict[str, float | str]] = {}
    expected: torch.Tensor | None = None
    for name, peer in peers(case, where, dropout_p).items():
        try:
            if dropout_p:
                assert_dropout_keeps_the_mean(peer(q, k, torch.ones_like(v))[..., 0])
            else:
                out = peer(q, k, v)
                expected = out if expected is None else expected
                error = (out.double() - expected.double()).abs().max().item()
                eps = torch.finfo(where.dtype).eps
                assert error <= 4 * eps * expected.abs().max().item(), f"differs from ours by {error:.3g}"
            leaves = leaves_of(q, k, v)
            backward[name] = backward_of(peer, leaves, dout)
            backward[name]()
            timer.synchronize()
        except failures_of_a_kernel() as failure:
            if name == "fastbert":
                raise
            backward.pop(name, None)
            results[name] = {"fwd": f"none: {' '.join(str(failure).split())[:120]}"}
            continue
        forward[name] = partial(peer, *(leaves if dropout_p else (q, k, v)))
    with torch.set_grad_enabled(dropout_p > 0):
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
    total, lengths, width = where.choose((32, (16, 32), 32), (16384, (512, 1024, 2048), 1024))
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


def assert_dropout_keeps_the_mean(sums: torch.Tensor) -> None:
    """Of the probabilities that dropout leaves, which are 1 in the mean: six standard deviations, and rounding."""
    sums = sums.double()
    spread, eps = sums.std().item(), torch.finfo(torch.bfloat16).eps
    assert spread > eps, "nothing is dropped"
    off = abs(sums.mean().item() - 1)
    assert off <= 6 * spread / sums.numel() ** 0.5 + eps, f"the mean is off by {off:.3g}"


def attention_with_dropout(bench: Bench) -> dict[str, Any]:
    """As in training, with what transformers' BERT has: 0.1."""
    _, where, timer = bench
    total, lengths, heads, head_dim = where.choose((16, (16,), 1, 32), (16384, (128, 512, 1024), 16, 64))
    numbers: Rows = {}
    for length in lengths:
        case = Lengths("", (length,) * (total // length))
        seconds = _attention_seconds(bench, case, heads, head_dim, dropout_p=0.1)
        for name, row in _rates(case, heads, head_dim, seconds).items():
            numbers.setdefault(name, {}).update({f"{kind} {length}": value for kind, value in row.items()})
    return {"numbers": numbers, "unit": f"TFLOP/s, {total} tokens, {heads} heads of {head_dim}", **timer.note()}


def keys_seen(length: int, window: int) -> int:
    """By all queries of a sequence, `window` tokens before and after each; -1: no end."""
    if window < 0:
        return length * length
    return sum(min(length, i + window + 1) - max(0, i - window) for i in range(length))


def attention_kinds(bench: Bench) -> dict[str, Any]:
    """What only some families have, ours alone: TFLOP/s of the products that are seen (a window leaves most of them
    out), and with a rotation before them of the two together. Four query heads of a group read one key head; windows
    are ModernBERT's, 64 tokens before and after."""
    _, where, timer = bench
    total, lengths, heads, head_dim = where.choose((32, (32,), 4, 32), (16384, (512, 2048), 16, 64))
    window = where.choose(4, 64)
    numbers: Rows = {}
    for length in lengths:
        case = Lengths("", (length,) * (total // length))
        cu_seqlens = case.cu_seqlens.to(where.device)
        positions = torch.arange(total, device=where.device, dtype=torch.int32) % length
        angles = torch.outer(positions[:length], 10000.0 ** -torch.linspace(0, 1, head_dim // 2, device=where.device))
        tables = ops.Rotary(angles.cos(), angles.sin())
        by_token = ops.Rotary(*(t[positions.long()] for t in tables[:2]), by_token=True)
        local: dict[str, Any] = {"window_size": (window, window)}
        kinds: dict[str, dict[str, Any]] = {
            "plain": {},
            "grouped": {},
            "window": local,
            "window by positions": {**local, "window_positions": positions},
            "rotary": {"rotary": tables},
            "rotary, interleaved": {"rotary": tables._replace(interleaved=True)},
            "rotary by token": {"rotary": by_token},
            "window and rotary": {**local, "rotary": tables},
        }
        forward: dict[str, Call] = {}
        backward: dict[str, Call] = {}
        for name, options in kinds.items():
            kv_heads = heads // 4 if name == "grouped" else heads
            q, k, v = (where.randn(total, n, head_dim, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
            shared = {"cu_seqlens": cu_seqlens, "max_seqlen": length, "cache": {}, "backend": where.backend}
            ours = partial(ops.attention, **shared, **options)
            forward[name] = without_autograd(partial(ours, q, k, v))
            backward[name] = backward_of(ours, leaves_of(q, k, v), where.randn(total, heads, head_dim, seed=3))
        for kind, calls, operations in (("fwd", forward, 4.0), ("bwd", backward, 10.0)):
            for name, seconds in timer.medians(calls).items():
                seen = keys_seen(length, window if "window" in name else -1) * (total // length)
                rate = operations * heads * head_dim * seen / seconds / 1e12
                numbers.setdefault(name, {}).update({f"{kind} {length}": rate, f"{kind} {length}, us": 1e6 * seconds})
    return {"numbers": numbers, "unit": f"TFLOP/s, {total} tokens, {heads} heads of {head_dim}", **timer.note()}


def ragged(bench: Bench) -> dict[str, Any]:
    """Lengths from 64 to 960 in steps of 28, shuffled, beside equal ones of their mean, 512."""
    record, where, timer = bench
    step, mean = where.choose((1, 16), (28, 512))
    lengths = torch.arange(mean - 16 * step, mean + 16 * step + 1, step)
    lengths = lengths[lengths > 0][torch.randperm(int((lengths > 0).sum()), generator=torch.Generator().manual_seed(0))]
    heads, head_dim = where.choose((1, 32), (16, 64))
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
    norm_leaves = leaves_of(x, residual, weight, bias, x_bias)
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
    for backend in runnable(where, "add_rms_norm"):
        rms = partial(ops.add_rms_norm, backend=backend)
        rms_leaves = leaves_of(x, residual, weight)
        calls["add_rms_norm_fwd", backend] = (without_autograd(partial(rms, x, residual, weight)), 3 * matrix)
        calls["add_rms_norm_bwd", backend] = (backward_of(rms, rms_leaves, dout), 3 * matrix)
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
        leaves = leaves_of(x, weight, bias)

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
