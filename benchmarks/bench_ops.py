"""Ops one by one, a backend and a dtype each: `make bench-ops`, or `pytest benchmarks/bench_ops.py`.

Shapes are BERT-base's on the batches of `fastbert bench`. An op is checked against the oracle before it is timed;
`extra_info` of the JSON (`--benchmark-json`) holds GFLOP/s, or GB/s where memory decides: bytes read and written once.
A backend that cannot serve a call is skipped with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from fastbert import ops
from fastbert.backend import Backend
from fastbert.errors import BackendError
from fastbert.testing import reference
from fastbert.testing.cases import DTYPES, MODELS, WORKLOADS, Workload
from fastbert.testing.numerics import assert_close_to_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = MODELS["bert-base"]
HIDDEN, INNER, HEADS = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_attention_heads"]


@dataclass(frozen=True)
class Case:
    """One op on one batch. `run` takes the tensors and `backend=`, `oracle` the tensors alone."""

    tensors: tuple[torch.Tensor, ...]
    run: Callable[..., torch.Tensor]
    oracle: Callable[..., torch.Tensor]
    flops: int = 0
    values: int = 0  # read or written, each once, where memory decides


def add_layer_norm(workload: Workload) -> Case:
    rows = sum(workload.lengths)
    x, residual = torch.randn(2, rows, HIDDEN)
    weight, bias, x_bias = torch.randn(3, HIDDEN)
    return Case(
        (x, residual, weight, bias, x_bias),
        lambda x, residual, weight, bias, x_bias, backend: ops.add_layer_norm(
            x, residual, weight, bias, x_bias=x_bias, backend=backend
        ),
        lambda *tensors: reference.add_layer_norm(*tensors)[0],
        values=3 * rows * HIDDEN,
    )


def attention(workload: Workload) -> Case:
    lengths = workload.lengths
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return Case(
        tuple(torch.randn(3, sum(lengths), HEADS, HIDDEN // HEADS)),
        lambda q, k, v, backend: ops.attention(q, k, v, cu_seqlens.to(q.device), max(lengths), backend=backend),
        lambda q, k, v: reference.attention(q, k, v, cu_seqlens),
        flops=sum(4 * length * length * HIDDEN for length in lengths),
    )


def linear(workload: Workload) -> Case:
    rows = sum(workload.lengths)
    return Case(
        (torch.randn(rows, HIDDEN), torch.randn(HIDDEN, HIDDEN) * HIDDEN**-0.5, torch.randn(HIDDEN)),
        ops.linear,
        lambda x, weight, bias: x @ weight.T + bias,
        flops=2 * rows * HIDDEN * HIDDEN,
    )


def linear_int8(workload: Workload) -> Case:
    """x are whole numbers up to 127, so that quantising its rows loses nothing and the oracle is the plain product."""
    rows = sum(workload.lengths)
    x = torch.randint(-127, 128, (rows, HIDDEN)).float()
    x[:, 0] = 127
    weight, scale = torch.randint(-127, 128, (INNER, HIDDEN), dtype=torch.int8), torch.rand(INNER) / 127
    return Case(
        (x, weight, torch.randn(INNER)),
        lambda x, weight, bias, backend: ops.linear(x, weight, bias, weight_scale=scale.to(x.device), backend=backend),
        lambda x, weight, bias: x @ (weight.to(x.dtype) * scale.to(x.dtype)[:, None]).T + bias,
        flops=2 * rows * HIDDEN * INNER,
    )


def linear_gelu(workload: Workload) -> Case:
    rows = sum(workload.lengths)
    return Case(
        (torch.randn(rows, HIDDEN), torch.randn(INNER, HIDDEN) * HIDDEN**-0.5, torch.randn(INNER)),
        partial(ops.linear, activation="gelu"),
        lambda *tensors: reference.linear(*tensors, "gelu"),
        flops=2 * rows * HIDDEN * INNER,
    )


def feed_forward(workload: Workload) -> Case:
    up, down = torch.randn(INNER, HIDDEN) * HIDDEN**-0.5, torch.randn(HIDDEN, INNER) * INNER**-0.5
    return Case(
        (torch.randn(sum(workload.lengths), HIDDEN), up, torch.randn(INNER), down),
        ops.feed_forward,
        lambda *tensors: reference.feed_forward(*tensors, "gelu"),
        flops=4 * sum(workload.lengths) * HIDDEN * INNER,
    )


CASES = (add_layer_norm, attention, linear, linear_int8, linear_gelu, feed_forward)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.id)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("backend", [b.value for b in Backend])
@pytest.mark.parametrize("make_case", CASES, ids=lambda c: c.__name__)
def test_op(
    benchmark: Any, make_case: Callable[[Workload], Case], backend: str, dtype: torch.dtype, workload: Workload
) -> None:
    torch.manual_seed(0)
    case = make_case(workload)
    tensors = [t.to(dtype) if t.is_floating_point() else t for t in case.tensors]
    on_device = [t.to(DEVICE) for t in tensors]

    def call() -> torch.Tensor:
        out = case.run(*on_device, backend=backend)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return out

    with torch.inference_mode():
        try:
            out = call()
        except BackendError as error:
            pytest.skip(str(error))
        in_float64 = [t.double() if t.is_floating_point() else t for t in tensors]
        oracle, baseline = case.oracle(*in_float64), case.oracle(*tensors)
        assert_close_to_reference(out.cpu(), oracle, baseline, name=make_case.__name__)
        benchmark(call)
    seconds = benchmark.stats.stats.median
    if case.flops:
        benchmark.extra_info["GFLOP/s"] = round(case.flops / seconds / 1e9, 1)
    else:
        benchmark.extra_info["GB/s"] = round(case.values * dtype.itemsize / seconds / 1e9, 1)
