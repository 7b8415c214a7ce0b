"""Relative terms of attention: rows by distance of every kind, tables, and the comparison with the float64 oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from attention_cases import Tensors, make
from draw import Draw
from op_case import Case, draw_lengths
from remembered import remembered
from seeds import manual_seed

from fastbert import ops
from fastbert.ops import Relative, attention
from fastbert.testing import reference
from fastbert.testing.cases import Lengths
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

TERMS = {"key": ("key",), "query": ("query",), "both": ("key", "query"), "bias": ("bias",)}
TERMS["all"] = ("key", "query", "bias")
NAMES = ("q", "k", "v", "key", "query", "bias")


def _clamped(distance: torch.Tensor, span: int) -> torch.Tensor:
    """DeBERTa v1's: a row for each distance from -span to span - 1, and the ends' for those beyond."""
    return distance.clamp(-span, span - 1) + span


def _buckets(distance: torch.Tensor, span: int, farthest: int) -> torch.Tensor:
    """DeBERTa v2's: exact up to span / 2, by logarithm up to `farthest`, one row beyond on either side."""
    exact = span // 2
    far = exact + (distance.abs().double() / exact).log() / math.log((farthest - 1) / exact) * (exact - 1)
    far = torch.where(distance.abs() <= exact, distance.abs().double(), far.ceil())
    return (distance.sign() * far.long()).clamp(-span, span - 1) + span


# By name: (number of rows, which row each distance has).
ROWS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "buckets": (32, partial(_buckets, span=16, farthest=40)),
    "clamped": (24, partial(_clamped, span=12)),
    "one-sided": (9, lambda distance: (distance + 70).clamp(0, 7)),  # the same row from one distance on
    "any": (11, lambda distance: distance.remainder(7) * distance.remainder(5) % 11),
    "two": (2, lambda distance: (distance > 0).long()),
}


def rows_of(kind: str, longest: int) -> torch.Tensor:
    return ROWS[kind][1](torch.arange(1 - longest, longest)).int()


def holes(case: Lengths, largest_step: int = 4) -> torch.Tensor:
    """Places of tokens: they begin anywhere, and leave some out; slack has any."""
    steps = [torch.randint(1, largest_step + 1, (n,)).cumsum(0) for n in case.lengths]
    begun = [places + torch.randint(-3, 100, ()) for places in steps]
    return torch.cat([*begun, torch.randint(-9, 9, (case.padding_rows,))]).int()


def longest_of(case: Lengths, positions: torch.Tensor | None) -> int:
    if positions is None:
        return max(case.lengths, default=0) + 2
    parts = [part for part in positions.split([*case.lengths, case.padding_rows])[:-1] if len(part)]
    return max(int(part[-1] - part[0]) for part in parts) + 1


def make_terms(case: Lengths, terms: str, kind: str, heads: int, head_dim: int, dtype, positions=None) -> Relative:
    """Tables whose terms have a standard deviation of 1.5 where softmax_scale is 1 / sqrt(head_dim)."""
    num_rows = ROWS[kind][0]
    key, query = (1.5 * torch.randn(num_rows, heads, head_dim) for _ in range(2))
    tables = {"key": key.to(dtype), "query": query.to(dtype), "bias": 1.5 * torch.randn(num_rows, heads)}
    given = {name: tables[name] for name in TERMS[terms]}
    return Relative(rows_of(kind, longest_of(case, positions)), **given, positions=positions)


def differentiate(f, tensors: Tensors, relative: Relative, dout: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output of f(q, k, v, relative=...), and the gradients of q, k, v and the tables that there are."""
    given = dict(zip(NAMES, (*tensors, *relative[1:4]), strict=True))
    leaves = {name: t.detach().clone().requires_grad_() for name, t in given.items() if t is not None}
    tables = {name: leaves.get(name) for name in NAMES[3:]}
    out = f(*(leaves[name] for name in "qkv"), relative=relative._replace(**tables))
    found = [torch.zeros_like(leaf) for leaf in leaves.values()]
    if out.requires_grad:  # the formula of nothing at all has no graph
        found = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype), allow_unused=True)
    named = {name: torch.zeros_like(leaves[name]) if t is None else t for name, t in zip(leaves, found, strict=True)}
    return {"out": out.detach(), **named}


def run(backend: str, case: Lengths, tensors: Tensors, relative: Relative, dout, seed: int = 0, **options):
    def ours(*qkv, relative):
        manual_seed(seed)
        return attention(
            *qkv, case.cu_seqlens, max(case.lengths, default=0), relative=relative, backend=backend, **options
        )

    return differentiate(ours, tensors, relative, dout)


def check(backend: str, case: Lengths, tensors: Tensors, relative: Relative, keep=None, seed: int = 0, **options):
    """By the error rule; gradients of q, k and v count together, as differences that cancel, and each table's alone."""
    dout = torch.randn_like(tensors[0])
    found = run(backend, case, tensors, relative, dout, seed, **options)
    of_formula = remembered(_literal, tensors, relative, dout, cu_seqlens=case.cu_seqlens, keep=keep, **options)
    found, oracle, baseline = (
        {**each, "dqkv": torch.cat([each[name].flatten() for name in "qkv"])} for each in (found, *of_formula)
    )
    if "bias" in found:
        assert found["bias"].dtype is torch.float32
        found["bias"] = found["bias"].to(baseline["bias"].dtype)
    for name in [name for name in found if name not in ("q", "k", "v")]:  # which are in dqkv
        factor = OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR
        assert_close_to_reference(found[name], oracle[name], baseline[name], factor, name)


def _literal(tensors: Tensors, relative: Relative, dout, **options) -> tuple[dict[str, torch.Tensor], ...]:
    """In float64, and in the tensors' own dtype."""
    formula = partial(reference.attention, **options)
    doubles = relative._replace(
        **{name: t.double() for name in NAMES[3:] if (t := getattr(relative, name)) is not None}
    )
    in_dtype = relative if relative.bias is None else relative._replace(bias=relative.bias.to(tensors[0].dtype))
    return (
        differentiate(formula, tuple(t.double() for t in tensors), doubles, dout),
        differentiate(formula, tensors, in_dtype, dout),
    )


def check_operands_where_they_lie(backend: str, case: Lengths, max_seqlen: int) -> None:
    """Slices of a fused projection, tables with other numbers between their rows, a bias in bfloat16."""
    tensors, relative = make(case, 2), make_terms(case, "all", "clamped", 2, 32, torch.float32)
    fused, wide = torch.cat(tensors, 1).split(2, 1), torch.cat([relative.key, relative.query], 2)
    f = partial(attention, cu_seqlens=case.cu_seqlens, max_seqlen=max_seqlen, backend=backend)
    key, query = wide.split(32, 2)
    bias = relative.bias.bfloat16()
    expected = f(*tensors, relative=relative._replace(bias=bias.float()))
    assert torch.equal(f(*fused, relative=relative._replace(key=key, query=query, bias=bias)), expected)
    leaf = bias.clone().requires_grad_()
    (dbias,) = torch.autograd.grad(f(*tensors, relative=relative._replace(bias=leaf)).sum(), leaf)
    assert dbias.dtype is torch.bfloat16


def relative_attention(draw: Draw, backend: str, dtype: torch.dtype):
    """For the table of ops: see op_cases.py."""
    lengths = draw_lengths(draw, 20 if backend == "triton" else 70)
    is_small = backend == "triton" and dtype is torch.float32  # whose kernels have heads of up to 64
    heads, head_dim = draw.integer(1, 3), draw.choice((16, 2, 3, 8, 24, 32, 33, 64, *(() if is_small else (80,))))
    kind, terms = draw.choice(ROWS), draw.choice(TERMS)
    tokens, generator = lengths.total_tokens, torch.Generator().manual_seed(draw.seed())
    options: dict = {}
    if draw.flag(3):
        options["softmax_scale"] = draw.choice((0.0, -0.3, 1.0))
    if draw.flag(3):
        options["window_size"] = (draw.integer(-1, 6), draw.integer(-1, 6))
    positions = None
    if draw.flag(3):  # with holes
        positions = torch.randint(1, 4, (tokens,), generator=generator).cumsum(0).int()
    rows = rows_of(kind, 3 * max(lengths.lengths) + 1)
    draw.note(
        f"{lengths.lengths} + {lengths.padding_rows}, {terms}, {kind} rows, holes {positions is not None}, {options}"
    )
    shapes = {name: (tokens, heads, head_dim) for name in "qkv"}
    for name in TERMS[terms]:
        shapes[name] = (ROWS[kind][0], heads) if name == "bias" else (ROWS[kind][0], heads, head_dim)

    def called(function, q, k, v, **tables):
        return function(q, k, v, cu_seqlens=lengths.cu_seqlens, relative=Relative(rows, **tables, positions=positions))

    op = partial(called, partial(ops.attention, max_seqlen=max(lengths.lengths), backend=backend, **options))
    case = Case(op, partial(called, partial(reference.attention, **options)), shapes, dtype, joint=True)
    case.has_means = False  # as in attention
    parts = [torch.full((n,), i) for i, n in enumerate((*lengths.lengths, lengths.padding_rows))]
    return case, torch.cat(parts), torch.cat(parts)
