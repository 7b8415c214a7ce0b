"""Ops one by one, a backend and a dtype each: `make bench-ops`, or `pytest benchmarks/bench_ops.py`.

Shapes are BERT-base's on the batches of `fastbert bench`. An op is checked against the oracle before it is timed;
`extra_info` of the JSON (`--benchmark-json`) holds GFLOP/s, or GB/s where memory decides: bytes read and written once.
A backend that cannot serve a call is skipped with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fastbert import ops
from fastbert.backend import Backend, BackendError
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


def linear_gelu(workload: Workload) -> Case:
    rows = sum(workload.lengths)
    return Case(
        (torch.randn(rows, HIDDEN), torch.randn(INNER, HIDDEN) * HIDDEN**-0.5, torch.randn(INNER)),
        ops.linear_gelu,
        lambda *tensors: reference.linear_gelu(*tensors, "gelu"),
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


CASES = (add_layer_norm, attention, linear_gelu, feed_forward)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.id)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("backend", [b.value for b in Backend])
@pytest.mark.parametrize("make_case", CASES, ids=lambda c: c.__name__)
def test_op(
    benchmark: Any, make_case: Callable[[Workload], Case], backend: str, dtype: torch.dtype, workload: Workload
) -> None:
    torch.manual_seed(0)
    case = make_case(workload)
    tensors = [t.to(dtype) for t in case.tensors]
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
        oracle, baseline = case.oracle(*(t.double() for t in tensors)), case.oracle(*tensors)
        assert_close_to_reference(out.cpu(), oracle, baseline, name=make_case.__name__)
        benchmark(call)
    seconds = benchmark.stats.stats.median
    if case.flops:
        benchmark.extra_info["GFLOP/s"] = round(case.flops / seconds / 1e9, 1)
    else:
        benchmark.extra_info["GB/s"] = round(case.values * dtype.itemsize / seconds / 1e9, 1)
