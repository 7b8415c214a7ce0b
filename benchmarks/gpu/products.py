"""Products of matrices on a GPU: those of an encoder as torch has them, in bf16 and in fp8, beside ours; feed-forward.

Rates are those of one product of 16384 tokens, what comes before or after it in the same call included.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.checks import Call, Timer, Where, feed_forward_plans, feed_forward_rows, planned
from benchmarks.gpu.kernels import unsupported
from benchmarks.gpu.record import Record, failures_of_a_kernel
from benchmarks.gpu.tune import SHIPPED_PLAN, is_tried, plan_label
from fastbert import ops
from fastbert.testing.numerics import OUTPUT_FACTOR, assert_close_to_reference

Bench = tuple[Record, Where, Timer]
Rows = dict[str, dict[str, float | str]]
# (in_features, out_features) of BERT-base and BERT-large: attention's output, its three inputs as one, feed-forward.
SHAPES = tuple((n * size, m * size) for size in (768, 1024) for n, m in ((1, 1), (1, 3), (1, 4), (4, 1)))
FP8_LARGEST = 448.0  # of e4m3
FP8_SCALES: dict[str, tuple[int, ...]] = {"a matrix": (0, 1), "a row": (1,)}  # the dimensions that share one


def leaves_of(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


def runnable(where: Where, op: str) -> list[str]:
    """The backends that have a kernel of `op` for GPUs and can run it here; the first is what a GPU gets."""
    return [backend.value for backend, reason in unsupported(where.device)[op].items() if reason is None]


def products(bench: Bench) -> dict[str, Any]:
    """TFLOP/s of every contestant of `contestants`; one that is not there, or is wrong, says so."""
    record, where, timer = bench
    rows = where.choose(16, 16384)
    numbers: Rows = {}
    for columns in where.choose(((32, 128),), SHAPES):
        calls: dict[str, Call] = {}
        shape = f"{columns[0]} -> {columns[1]}"
        for name, (call, oracle, baseline) in contestants(record, where, rows, *columns).items():
            try:
                assert_close_to_reference(call(), oracle(), baseline().to(where.dtype), OUTPUT_FACTOR, name)
                timer.synchronize()
                calls[name] = call
            except failures_of_a_kernel() as failure:
                numbers.setdefault(name, {})[shape] = f"none: {' '.join(str(failure).split())[:80]}"
        for name, seconds in timer.medians(calls).items():
            numbers.setdefault(name, {})[shape] = 2.0 * rows * columns[0] * columns[1] / seconds / 1e12
    ceiling = record.facts["gemm_flops_per_second"] / 1e12
    note = "; ".join([f"the ceiling, a square product in bf16, is {ceiling:.3g}", *timer.note().values()])
    return {"numbers": numbers, "unit": f"TFLOP/s, {rows} tokens", "note": note}


Tensor = Callable[[], torch.Tensor]


def contestants(
    record: Record, where: Where, rows: int, columns_in: int, columns_out: int
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """{name: (the call, the same in float64, the same formula in bf16)}; w is (out, in), as a Linear has it."""
    x, w = where.randn(rows, columns_in), where.randn(columns_out, columns_in, scale=columns_in**-0.5, seed=1)
    bias, dout = where.randn(columns_out, seed=2), where.randn(rows, columns_out, seed=3)
    residual, dx = dout, torch.zeros_like(x)

    def three(formula: Callable[..., torch.Tensor], call: Tensor, *operands: torch.Tensor) -> tuple[Tensor, ...]:
        return call, lambda: formula(*(t.double() for t in operands)), lambda: formula(*operands)

    def product(x, w):
        return x @ w.t()

    def biased(x, w, bias):
        return x @ w.t() + bias

    def activated(x, w, bias, approximate="none"):
        return F.gelu(biased(x, w, bias), approximate=approximate)

    found = {
        "x w": three(product, lambda: torch.mm(x, w.t()), x, w),
        "x w + bias": three(biased, lambda: F.linear(x, w, bias), x, w, bias),
        "x w + matrix (addmm, beta = 1)": three(biased, lambda: torch.addmm(residual, x, w.t()), x, w, residual),
        "tanh gelu of x w + bias, as cuBLAS' epilogue": three(
            partial(activated, approximate="tanh"),
            lambda: torch._addmm_activation(bias, x, w.t(), use_gelu=True),
            x,
            w,
            bias,
        ),
        "gelu of x w + bias, torch": three(activated, lambda: F.gelu(F.linear(x, w, bias)), x, w, bias),
        "gelu of x w + bias, fastbert": three(activated, partial(_up, None, x, w, bias), x, w, bias),
        "dx: dout w": three(torch.mm, lambda: torch.mm(dout, w), dout, w),
        "dx + dout w (addmm, beta = 1)": three(
            lambda dx, dout, w: dx + dout @ w, lambda: torch.addmm(dx, dout, w), dx, dout, w
        ),
        "dw: dout x": three(lambda dout, x: dout.t() @ x, lambda: torch.mm(dout.t(), x), dout, x),
    }
    if columns_out == 4 * columns_in and is_tried(record, plan_label(columns_in, 0, "epilogue")):
        up = partial(_up, feed_forward_plans(where)["epilogue"], x, w, bias)
        found["gelu of x w + bias, fastbert's epilogue"] = three(activated, up, x, w, bias)
    return found | dict(_in_fp8(where, x, w, bias))  # type: ignore[return-value]


def _up(plan: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The first half of kernels/feed_forward.py: a product and its activation, in one kernel or in two."""
    kernels = importlib.import_module("fastbert.kernels.feed_forward")
    (rows, columns_in), columns = x.shape, w.shape[0]
    options: dict[str, Any] = {"GATED": False, "ACTIVATION": "gelu"}
    if plan is None:
        inner = torch.addmm(bias, x, w.t())
        tile = kernels._BLOCK_M, kernels._BLOCK_N
        grid = (-(-rows // tile[0]), -(-columns // tile[1]))
        kernels._activation_fwd_kernel[grid](inner, inner, rows, columns, **options, BLOCK_M=tile[0], BLOCK_N=tile[1])
        return inner
    inner = x.new_empty(rows, columns)
    programs = -(-rows // plan.up["BLOCK_M"]) * -(-columns // plan.up["BLOCK_N"])
    sizes = (rows, columns, columns_in, columns_in, columns_in)
    kernels._up_kernel[(programs,)](
        x, w, bias, inner, inner, *sizes, HAS_BIAS=True, RETURN_PRE=False, **options, **plan.up
    )
    return inner


def _in_fp8(where: Where, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor):
    """torch's products of e4m3 with one scale a matrix or a row; the oracle multiplies the rounded operands."""

    def rounded(t: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        scale = t.float().abs().amax(dims, keepdim=True) / FP8_LARGEST
        return (t.float() / scale).to(torch.float8_e4m3fn), scale

    for name, dims in FP8_SCALES.items():
        (x8, x_scale), (w8, w_scale) = rounded(x, dims), rounded(w, dims)
        if dims == (1,):
            scales = {"scale_a": x_scale, "scale_b": w_scale.t()}
        else:
            scales = {"scale_a": x_scale.view(()), "scale_b": w_scale.view(())}
        values, weights = x8.double() * x_scale, w8.double() * w_scale

        def call(fast: bool, added: torch.Tensor | None, x8=x8, w8=w8, scales=scales) -> torch.Tensor:
            out: torch.Tensor = torch._scaled_mm(
                x8, w8.t(), **scales, bias=added, out_dtype=where.dtype, use_fast_accum=fast
            )
            return out

        def literal(dtype: torch.dtype, added: torch.Tensor | None, values=values, weights=weights) -> torch.Tensor:
            out = values.to(dtype) @ weights.to(dtype).t()
            return out if added is None else out + added.to(dtype)

        for extra, fast, added in (("", True, None), (", sums in fp32", False, None), (" + bias", True, bias)):
            oracle, baseline = (partial(literal, dtype, added) for dtype in (torch.float64, where.dtype))
            yield f"fp8, a scale {name}: x w{extra}", (partial(call, fast, added), oracle, baseline)


def feed_forward(bench: Bench, hidden_size: int, gated_size: int = 0) -> dict[str, Any]:
    """Each plan of kernels/feed_forward.py, the CUDA backend where it is built, and torch's GEMM, GELU, GEMM; shares of
    the GEMM ceiling. A plain one is four times as wide as x; a gated one has `gated_size` columns and no bias, its
    gate and up as one weight or, in the row "apart", as two."""
    record, where, timer = bench
    gated, inner = gated_size > 0, gated_size or 4 * hidden_size
    shapes = ((2 * inner if gated else inner, hidden_size), (hidden_size, inner))
    up, down = (where.randn(*shape, scale=hidden_size**-0.5) for shape in shapes)
    bias = None if gated else where.randn(inner)
    plans = {
        name: plan
        for name, plan in feed_forward_plans(where, gated).items()
        if name == SHIPPED_PLAN or is_tried(record, plan_label(hidden_size, gated_size, name))
    }
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

    for rows in feed_forward_rows(where):
        x, dout = where.randn(rows, hidden_size), where.randn(rows, hidden_size, seed=1)
        leaves = [None if t is None else t.detach().requires_grad_() for t in (x, up, bias, down)]
        forward: dict[str, Call] = {"torch": partial(in_torch, x, up, bias, down)}
        both: dict[str, Call] = {"torch": partial(step, in_torch, leaves, dout)}
        for name, plan in plans.items():
            backend = "cuda" if name == "cuda" else where.backend
            ours = partial(ops.feed_forward, gated=gated, backend=backend)
            forward[name] = with_plan(plan, partial(ours, x, up, bias, down))
            both[name] = with_plan(plan, partial(step, ours, leaves, dout))
        if gated:
            gate, own = leaves_of(*(t.contiguous() for t in up.chunk(2)))

            def apart(x, gate, own, down):
                return ops.feed_forward(x, own, None, down, gated=True, gate_weight=gate, backend=where.backend)

            forward["apart"] = partial(apart, x, gate, own, down)
            both["apart"] = partial(step, apart, [leaves[0], gate, own, leaves[3]], dout)
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
