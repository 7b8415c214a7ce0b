"""The ceiling: the best rate of this machine's matrix products, which a whole model is compared with."""

from __future__ import annotations

import torch

from fastbert.bench.jobs import Call
from fastbert.bench.timing import measure_once

ROWS = 1024
SHAPES = ((768, 768), (768, 3072), (3072, 768))  # (in_features, out_features) of BERT-base


def gemm(precision: str, in_features: int, out_features: int) -> Call:
    """One product of `ROWS` rows through oneDNN with prepacked weights, as torch's own fastest path calls it.

    int8: unsigned activations with one scale, signed weights with one scale a channel; out comes bfloat16, or float32
    where oneDNN has no such kernel and takes a minute for a product.
    """
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(out_features, generator=generator)
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if precision == "int8":
        x = torch.randint(0, 256, (ROWS, in_features), dtype=torch.uint8, generator=generator)
        weight = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8, generator=generator)
        packed = torch.ops.onednn.qlinear_prepack(weight, [ROWS, in_features])
        scales, zeros = torch.full((out_features,), 0.01), torch.zeros(out_features, dtype=torch.long)
        out = torch.bfloat16 if has_bfloat16 else torch.float32
        return lambda: torch.ops.onednn.qlinear_pointwise(
            x, 0.01, 128, packed, scales, zeros, bias, 1.0, 0, out, "none", [], ""
        )
    dtype = getattr(torch, precision)
    x = torch.randn(ROWS, in_features, generator=generator).to(dtype)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = bias.to(dtype)
    if precision == "bfloat16" and not has_bfloat16:  # its weights cannot be prepacked
        return lambda: torch.nn.functional.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def gemms(precision: str) -> list[Call]:
    return [gemm(precision, *shape) for shape in SHAPES]


def rates(calls: list[Call], min_seconds: float) -> list[float]:
    """GFLOP/s of each of `SHAPES`, over as many calls as fill `min_seconds` each."""
    operations = [2 * ROWS * in_features * out_features for in_features, out_features in SHAPES]
    return [n / measure_once(call, min_seconds) / 1e9 for n, call in zip(operations, calls, strict=True)]
