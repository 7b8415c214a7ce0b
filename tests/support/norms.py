"""Operands of add_layer_norm and add_rms_norm, their calls, and the comparison with the float64 oracle."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from isas import backend_with_isa, device_of
from seeds import manual_seed

from fastbert.backend import select
from fastbert.errors import BackendError
from fastbert.ops.layer_norm import add_layer_norm, add_rms_norm
from fastbert.testing import reference
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

OPERANDS = ("x", "residual", "weight", "bias", "x_bias")


@contextmanager
def serving(param: str):
    """The backend's name, while its ISA is set; a visible skip where this machine cannot run it."""
    skip_unless_served(param.partition("-")[0])
    with backend_with_isa(param) as name:
        yield name


def skip_unless_served(name: str) -> None:
    x = torch.empty(1, 8, device=device_of(name))
    try:
        select("add_layer_norm", name, x, None, x[0], x[0])
    except BackendError as error:
        pytest.skip(str(error))


def make(rows, hidden_size, dtype, backend="cpu", residual=True, x_bias=True, bias=True) -> dict:
    """Operands by name, in `dtype`; those that are switched off are None."""
    given = {"x": True, "residual": residual, "weight": True, "bias": bias, "x_bias": x_bias}
    shape = {"x": (rows, hidden_size), "residual": (rows, hidden_size)}
    return {
        name: torch.randn(shape.get(name, (hidden_size,))).to(device_of(backend), dtype) if given[name] else None
        for name in OPERANDS
    }


ZERO_CENTRED = "zero-centred"  # in the place of `rms`: RMSNorm by 1 + weight


def run(operands, rms=False, **options):
    """add_layer_norm, or add_rms_norm, which has no bias."""
    vectors = {"x_bias": operands["x_bias"], **options}
    if rms:
        assert operands["bias"] is None
        vectors["zero_centered_weight"] = rms == ZERO_CENTRED
        return add_rms_norm(operands["x"], operands["residual"], operands["weight"], **vectors)
    return add_layer_norm(operands["x"], operands["residual"], operands["weight"], operands["bias"], **vectors)


def literal(operands, rms=False, **options):
    if rms:
        given = {name: t for name, t in operands.items() if name != "bias"}
        given["weight"] = 1 + given["weight"] if rms == ZERO_CENTRED else given["weight"]
        return reference.add_rms_norm(**given, **options)
    return reference.add_layer_norm(**operands, **options)


def differentiate(function, operands, cotangents):
    """function(operands) -> (out, summed), and the gradients of the operands that are there; dsum may be None."""
    leaves = {name: None if t is None else t.detach().clone().requires_grad_() for name, t in operands.items()}
    results = function(leaves)
    used = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None]
    inputs = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    gradients = torch.autograd.grad([r for r, _ in used], list(inputs.values()), [c for _, c in used])
    return [*results, *gradients], ["out", "summed", *(f"d{name}" for name in inputs)]


def check(backend, operands, prenorm=True, eps=1e-12, keep=None, dropout_p=0.0, seed=0, rms=False):
    """Outputs and gradients of `backend` against the oracle; `keep` is the mask that `seed` gives."""
    x = operands["x"]
    cotangents = [torch.randn_like(x), torch.randn_like(x) if prenorm else None]

    def ours(o):
        manual_seed(seed)
        out = run(o, rms, dropout_p=dropout_p, eps=eps, prenorm=prenorm, backend=backend)
        return out if prenorm else (out, None)

    def formula(o):
        out, summed = literal(o, rms, eps=eps, keep=keep, dropout_p=dropout_p)
        return out, summed if prenorm else None

    def double(t):
        return None if t is None else t.double()

    actual, names = differentiate(ours, operands, cotangents)
    baseline, _ = differentiate(formula, operands, cotangents)
    oracle, _ = differentiate(formula, {n: double(t) for n, t in operands.items()}, [double(c) for c in cotangents])
    for name, a, o, b in zip(names, actual, oracle, baseline, strict=True):
        if a is not None:
            factor = OUTPUT_FACTOR if name in ("out", "summed") else GRADIENT_FACTOR
            assert_close_to_reference(a, o, b, factor, name)


def keep_mask(backend, rows, hidden_size, dropout_p, seed, dtype=torch.float32):
    """The mask itself: the sum of dropped ones and nothing is not zero where they were kept."""
    manual_seed(seed)
    ones = torch.ones(rows, hidden_size, dtype=dtype, device=device_of(backend))
    return add_layer_norm(ones, None, ones[0], None, dropout_p=dropout_p, prenorm=True, backend=backend)[1] != 0


def everything(backend, rows=40, hidden_size=96, dtype=torch.float32, rms=False):
    """Results and gradients with all operands, with dropout."""
    manual_seed(0)
    operands = make(rows, hidden_size, dtype, backend, bias=not rms)

    def f(o):
        manual_seed(1)
        return run(o, rms, eps=1e-12, dropout_p=0.1, prenorm=True, backend=backend)

    return differentiate(f, operands, [torch.randn_like(operands["x"]) for _ in range(2)])[0]
