"""add_layer_norm and add_rms_norm on their own device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu.checks import Checks, Function, Tensors, Where, assert_keep_rate, compare, isolates_rows, repeats
from fastbert import ops
from fastbert.testing import reference
from fastbert.testing.cases import ROWS


def _operands(where: Where, rows: int, hidden_size: int, rms: bool) -> Tensors:
    matrices = {name: where.randn(rows, hidden_size, seed=i) for i, name in enumerate(("x", "residual"))}
    names = ("weight", *(() if rms else ("bias",)), "x_bias")
    return {**matrices, **{name: where.randn(hidden_size, seed=2 + i) for i, name in enumerate(names)}}


def norm_of(where: Where, rms: bool, x, residual=None, weight=None, bias=None, **options: Any) -> Any:
    """The op that `rms` names."""
    if rms:
        return ops.add_rms_norm(x, residual, weight, backend=where.backend, **options)
    return ops.add_layer_norm(x, residual, weight, bias, backend=where.backend, **options)


def _ours(where: Where, rms: bool, eps: float, dropout_p: float = 0.0, seed: int = 0) -> Function:
    """out and the sum, side by side: both get a gradient."""

    def ours(**tensors) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.stack(norm_of(where, rms, **tensors, dropout_p=dropout_p, eps=eps, prenorm=True))

    return ours


def _literal(rms: bool, eps: float, dropout_p: float = 0.0, keep: torch.Tensor | None = None) -> Function:
    def literal(x, residual=None, weight=None, **vectors) -> torch.Tensor:
        options: dict[str, Any] = {"eps": eps, "keep": keep, "dropout_p": dropout_p}
        if rms:
            return torch.stack(reference.add_rms_norm(x, residual, weight, **vectors, **options))
        bias = vectors.pop("bias", None)
        return torch.stack(reference.add_layer_norm(x, residual, weight, bias, **vectors, **options))

    return literal


def _against_oracle(where: Where, rms: bool, rows: int, hidden_size: int, mean: float = 0.0) -> None:
    eps = 1e-5 if where.dtype is torch.float16 else 1e-12
    tensors = _operands(where, rows, hidden_size, rms)
    tensors["x"] = tensors["x"] + mean
    variants = (tuple(tensors), ("x", "weight", "bias"), ("x", "residual", "weight", "x_bias"))
    for names in variants if rows < 10000 else variants[:1]:
        given = {name: t for name, t in tensors.items() if name in names}
        compare(_ours(where, rms, eps), _literal(rms, eps), given)


def _kept(
    where: Where, rms: bool, rows: int, hidden_size: int, dropout_p: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which elements of a matrix of ones are left in the sum, and which take a gradient."""
    x = torch.ones(rows, hidden_size, dtype=where.dtype, device=where.device).requires_grad_()
    torch.manual_seed(seed)
    _, summed = norm_of(where, rms, x, None, torch.ones_like(x[0]), dropout_p=dropout_p, prenorm=True)
    (dx,) = torch.autograd.grad(summed, x, torch.ones_like(summed))
    return summed.detach() != 0, dx != 0


def _dropout(where: Where, rms: bool) -> None:
    rows, hidden_size = where.choose((9, 80), (4096, 768))
    for dropout_p in (0.1, 0.5):
        forward, backward = _kept(where, rms, rows, hidden_size, dropout_p, 3)
        assert torch.equal(forward, backward), "backward has another dropout mask than forward"
        assert torch.equal(forward, _kept(where, rms, rows, hidden_size, dropout_p, 3)[0]), "one seed gave two masks"
        assert not torch.equal(forward, _kept(where, rms, rows, hidden_size, dropout_p, 4)[0]), (
            "two seeds gave one mask"
        )
        assert_keep_rate(forward, dropout_p)
    keep = _kept(where, rms, rows, hidden_size, 0.25, 5)[0]
    tensors = _operands(where, rows, hidden_size, rms)
    compare(_ours(where, rms, 1e-5, 0.25, 5), _literal(rms, 1e-5, 0.25, keep), tensors)


def _beyond_int32(where: Where, rms: bool) -> None:
    rows, hidden_size = 2**31 // 768 + 4096, 768
    x, weight = where.randn(rows, hidden_size), where.randn(hidden_size)
    out = norm_of(where, rms, x, None, weight, eps=1e-5)
    alone = norm_of(where, rms, x[-64:].clone(), None, weight, eps=1e-5)
    assert torch.equal(out[-64:], alone), "the last rows' bits depend on how many come before them"


def add_norm(rms: bool, where: Where) -> Checks:
    for rows, hidden_size in where.choose(ROWS[2:3], (*ROWS[1:], (65536, 768), (8193, 1024), (4096, 4100))):
        yield f"{rows}x{hidden_size}", partial(_against_oracle, where, rms, rows, hidden_size)
    rows, hidden_size = where.choose((5, 64), (1000, 768))
    yield "large mean", partial(_against_oracle, where, rms, rows, hidden_size, 100.0)
    yield "same bits", lambda: repeats(_ours(where, rms, 1e-5, 0.1), _operands(where, rows, hidden_size, rms))
    spoilt = _operands(where, *where.choose((9, 80), (4097, 768)), rms)
    yield "isolation", partial(isolates_rows, _ours(where, rms, 1e-5), spoilt)
    yield "dropout", partial(_dropout, where, rms)
    if not where.smoke and where.dtype is torch.bfloat16:
        yield "beyond 2^31 elements", partial(_beyond_int32, where, rms)


CHECKS = {"add_layer_norm": partial(add_norm, False), "add_rms_norm": partial(add_norm, True)}
